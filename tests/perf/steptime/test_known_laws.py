"""Models recover the laws that they are made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bench.cloud.step_time_models import Boosting, Ernest, Paleo, Pollux
from tests.perf._draw import drawn
from thrifty.perf.steptime import Overlapping, PerfectScaling, Setup
from thrifty.perf.steptime._hybrid import overlapped, terms
from thrifty.perf.steptime._model import Columns

from ._draw import forecast, grid


pytestmark = pytest.mark.slow


some = st.floats(0.0, 2.0)
LARGE = grid([(8,), (3, 3), (6, 6), (4,) * 8, (4, 1)], (8, 20, 32))


@settings(drawn, max_examples=40)
@given(st.floats(0.01, 2.0), some, some, some)
def test_the_law_of_ernest_is_learned_from_a_grid(fixed, per_sample, per_log, per_device):
    def law(setup):
        num = setup.num_devices
        return fixed + per_sample * setup.batch + per_log * np.log(num) + per_device * num

    setups = grid()
    guessed = forecast(Ernest, setups, [law(s) for s in setups], LARGE)
    assert guessed == pytest.approx([law(s) for s in LARGE], rel=1e-4)


@settings(drawn, max_examples=40)
@given(st.floats(0.01, 2.0), some, some, some)
def test_the_law_of_paleo_is_learned_from_a_grid(fixed, per_sample, outer, inner):
    def law(setup):
        nodes, most = len(setup.placement), max(setup.placement)
        ring = outer * (nodes - 1) / nodes + inner * (most - 1) / most
        return fixed + per_sample * setup.batch + ring

    setups, others = grid(), [s for s in LARGE if s.batch != 20]
    guessed = forecast(Paleo, setups, [law(s) for s in setups], others)
    assert guessed == pytest.approx([law(s) for s in others], rel=1e-4)


@pytest.mark.parametrize("gamma", [1.0, 1.6, 4.0])
@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e5])
def test_the_law_of_pollux_is_learned_from_a_grid(gamma, unit):
    def law(setup):
        num, several = setup.num_devices, len(setup.placement) > 1
        net = 0.4 + 0.02 * max(num - 2, 0) if several else 0.2 + 0.01 * max(num - 2, 0)
        compute = 0.05 + 0.01 * setup.batch
        return unit * (compute**gamma + (net * (num > 1)) ** gamma) ** (1 / gamma)

    setups = grid(batches=(2, 8, 32, 128))
    others = grid([(8,), (3, 3), (6, 6), (4,) * 8], (4, 20, 60))
    guessed = forecast(Pollux, setups, [law(s) for s in setups], others)
    assert guessed == pytest.approx([law(s) for s in others], rel=0.04)


@pytest.mark.parametrize(
    ("placements", "unseen"), [([(1,), (2,), (4,)], (4, 4)), ([(1,), (1, 1), (4, 4)], (8,))]
)
def test_pollux_adds_nothing_for_a_network_that_it_has_not_seen(placements, unseen):
    setups = grid(placements)
    times = [0.1 + 0.01 * s.batch + 0.1 * (s.num_devices > 1) for s in setups]
    model = Pollux()
    model.fit(setups, times)
    many, one = model.predict([Setup(placement=p, batch=16) for p in (unseen, (1,))])
    assert many == pytest.approx(one, rel=1e-5)
    assert one == pytest.approx(0.26, rel=0.05)


def test_pollux_does_not_see_growth_in_two_devices():
    setups = grid([(1,), (2,), (1, 1)])
    times = [0.1 + 0.01 * s.batch + 0.1 * (s.num_devices > 1) for s in setups]
    model = Pollux()
    model.fit(setups, times)
    two, many = model.predict([Setup(placement=p, batch=16) for p in ((1, 1), (1,) * 64)])
    assert many == pytest.approx(two, rel=1e-5)


def test_pollux_of_one_batch_is_half_fixed():
    model = Pollux()
    model.fit([Setup(placement=(1,), batch=8), Setup(placement=(4,), batch=8)], [1.0, 1.5])
    guessed = model.predict([Setup(placement=(1,), batch=b) for b in (8, 16, 32)])
    assert guessed == pytest.approx([1.0, 1.5, 2.5], rel=0.01)


@pytest.mark.parametrize("overlap", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("growth", ["log", "linear", "fullest"])
def test_overlapping_exchanges_are_learned_from_a_grid(overlap, growth):
    def exchange(setup):
        nodes, most = len(setup.placement), max(setup.placement)
        if nodes == 1:
            return 0.1 * np.log2(most)
        grown = {"log": np.log2(setup.num_devices), "linear": nodes - 1, "fullest": most}
        return 0.15 * grown[growth]

    def law(setup):
        return float(overlapped(0.05 + 0.01 * setup.batch, exchange(setup), overlap))

    setups = grid(batches=(2, 8, 32, 128))
    others = grid([(3,), (3, 3), (2, 2, 2), (4,) * 3], (2, 8, 32))
    guessed = forecast(Overlapping, setups, [law(s) for s in setups], others)
    assert guessed == pytest.approx([law(s) for s in others], rel=0.06)
    assert np.mean(np.abs(guessed / [law(s) for s in others] - 1)) < 0.02


def test_perfect_scaling_is_blind_to_placements():
    setups = grid()
    times = [0.1 + 0.01 * s.batch + 0.5 * (s.num_devices - 1) for s in setups]
    guessed = forecast(PerfectScaling, setups, times, LARGE)
    inside = [s.batch != 20 for s in LARGE]
    assert guessed[inside] == pytest.approx([0.1 + 0.01 * s.batch for s in LARGE if s.batch != 20])


def test_boosting_stays_where_it_was_beyond_what_it_has_seen():
    setups = grid([(1,) * n for n in (1, 2, 4, 8)])
    times = [0.01 * s.batch * s.num_devices for s in setups]
    far = grid([(1,) * n for n in (8, 16, 64)], (32,))
    guessed = forecast(Boosting, setups, times, far)
    assert guessed.tolist() == [guessed[0]] * 3
    assert guessed[0] == pytest.approx(0.01 * 32 * 8, rel=0.01)


def test_one_device_exchanges_nothing():
    columns = Columns.of(grid([(1,)]))
    assert not terms(columns).any()
