"""A physical model, with trees for the part that it does not explain."""

from __future__ import annotations

import numpy as np
import pytest

from thrifty.perf.steptime import Bagged, Hybrid, Overlapping, PerfectScaling

from ._draw import forecast, grid, noisy


pytestmark = pytest.mark.slow


def saturating(setup):
    """Return the seconds of a step whose exchange grows with every machine, but less and less."""
    nodes = len(setup.placement)
    return 0.02 + 0.003 * setup.batch + 0.6 * (1 - np.exp(-(nodes - 1) / 5))


def test_it_is_better_than_either_of_its_members_where_both_fail():
    seen = grid([(1,) * n for n in (1, 2, 3, 4, 5, 6)], (8, 16, 32, 64))
    far = grid([(1,) * n for n in (8, 10, 12)], (8, 16, 32, 64))
    truth = np.array([saturating(s) for s in far])
    model = Hybrid()
    model.fit(seen, noisy(seen, law=saturating))
    whole, members = model.predict(far), []
    for member in list(model._members):
        model._members = [member]
        members.append(model.predict(far))
    assert members[0].mean() < truth.mean() < members[1].mean()
    misses = [np.mean(np.abs(guessed / truth - 1)) for guessed in (whole, *members)]
    assert misses[0] < 0.8 * min(misses[1:])
    assert whole == pytest.approx(np.sqrt(members[0] * members[1]))


def test_trees_learn_what_physics_does_not_explain():
    def odd(setup):
        return saturating(setup) * (1.5 if setup.placement == (3, 1) else 1.0)

    setups = grid([(1,), (2,), (4,), (1, 1), (2, 2), (3, 1), (2, 1), (4, 4)], range(8, 40, 4))
    times = noisy(setups, law=odd, size=0.01)
    misses = [
        np.mean(np.abs(forecast(make, setups, times, setups) / times - 1))
        for make in (Hybrid, Overlapping, PerfectScaling)
    ]
    assert misses[0] < 0.5 * min(misses[1:])


def physics():
    return Bagged(Overlapping)


@pytest.mark.parametrize("num", [1, 5, 11])
def test_a_few_measurements_are_for_physics_alone(num):
    setups = grid()
    few, times = setups[::3][:num] + setups[1:][: max(num - 10, 0)], noisy(setups)[:num]
    one, other = (forecast(make, few[:num], times, setups) for make in (Hybrid, physics))
    assert one == pytest.approx(other, rel=1e-12)
