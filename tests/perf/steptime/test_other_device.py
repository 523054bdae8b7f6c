"""Step times of a network on a device on which it has hardly been measured."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import multivariate_normal

from thrifty.core import MissingExtraError, UsageError
from thrifty.perf.steptime._transfer import (
    OtherDevice,
    PairedSteps,
    _inputs,
    _likeliest,
    _parts,
    _Process,
    _Steps,
    _surprise,
)


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
WORK = (0.002, 0.01, 0.05, 0.2, 1.0)
"""Seconds of a sample on the measured device."""

MANY = tuple(np.geomspace(0.002, 1.0, 15))


def network(work, *, launch=1.0, times=4.0, noise=0.0, seed=0):
    """Return a network whose launches take equal time on both devices.

    Arithmetic takes ``times`` as long on the other device.
    """
    here = launch + work * BATCHES
    there = launch + times * work * BATCHES
    there *= np.exp(noise * np.random.default_rng([seed, int(1e6 * work)]).normal(size=8))
    return PairedSteps(setups=BATCHES[:, None], here_s=here, there_s=there)


def scaled(steps, factor):
    return PairedSteps(setups=steps.setups, here_s=steps.here_s, there_s=factor * steps.there_s)


def taken(steps, places):
    return PairedSteps(
        setups=steps.setups[places], here_s=steps.here_s[places], there_s=steps.there_s[places]
    )


def fitted(references, new, probes=(0, 4, 7)):
    model = OtherDevice(references)
    model.fit(taken(new, list(probes)))
    return model


def error(model, new):
    return np.abs(np.log(model.predict(new.setups, new.here_s) / new.there_s)).max()


def test_small_steps_take_alike_and_large_ones_as_the_devices_do():
    new = network(0.1)
    model = fitted([network(work) for work in MANY], new, probes=[3])
    assert error(model, new) < 0.01
    assert new.ratios[0] < 0.3
    assert new.ratios[-1] > 1.2  # a single ratio would not fit


def test_a_network_of_another_efficiency_needs_one_probe():
    factors = np.exp(0.3 * np.random.default_rng(0).normal(size=len(MANY)))
    references = [scaled(network(work), factor) for work, factor in zip(MANY, factors, strict=True)]
    new = scaled(network(0.1), 1.4)
    assert error(fitted(references, new, probes=[3]), new) < 0.01


def test_a_probe_counts_as_much_as_networks_differ():
    alike = [network(work, noise=0.1) for work in MANY]
    factors = np.exp(np.random.default_rng(0).normal(size=len(MANY)))
    differing = [scaled(each, factor) for each, factor in zip(alike, factors, strict=True)]
    new = scaled(network(0.1), 1.5)
    moved = [
        np.log(
            fitted(known, new, probes=[3]).predict(new.setups, new.here_s) / network(0.1).there_s
        )
        for known in (alike, differing)
    ]
    assert moved[0].mean() < 0.6 * np.log(1.5)
    assert moved[1].mean() == pytest.approx(np.log(1.5), abs=0.12)


def test_three_probes_show_a_network_that_bends_otherwise():
    references = [
        network(work, launch=launch) for work, launch in zip(WORK, (1, 3, 0.5, 2, 1), strict=True)
    ]
    new = network(0.1, times=8.0)
    one, three = (fitted(references, new, probes) for probes in ([0], [0, 4, 7]))
    assert error(three, new) < 0.15
    assert error(three, new) < 0.5 * error(one, new)


def test_references_need_few_steps_there():
    new = network(0.1)
    model = fitted([taken(network(work), [0, 4, 7]) for work in WORK], new)
    assert error(model, new) < 0.08


def test_the_larger_of_two_devices_may_be_the_one_at_hand_or_not():
    def turned(steps):
        return PairedSteps(setups=steps.setups, here_s=steps.there_s, there_s=steps.here_s)

    new = turned(network(0.1))
    assert error(fitted([turned(network(work)) for work in WORK], new), new) < 0.04


def test_a_number_that_all_setups_share_says_nothing():
    def wider(steps):
        setups = np.column_stack([steps.setups, np.full(8, 32.0)])
        return PairedSteps(setups=setups, here_s=steps.here_s, there_s=steps.there_s)

    new, references = network(0.1), [network(work) for work in WORK]
    plain = fitted(references, new)
    more = fitted([wider(each) for each in references], wider(new))
    assert more.predict(wider(new).setups, new.here_s) == pytest.approx(
        plain.predict(new.setups, new.here_s), rel=0.005
    )


@settings(max_examples=15, deadline=None)
@given(unit=st.floats(1e-4, 1e4), other=st.floats(1e-4, 1e4))
def test_units_do_not_matter(unit, other):
    def measured(steps):
        return PairedSteps(
            setups=steps.setups * other, here_s=steps.here_s * unit, there_s=steps.there_s * unit
        )

    new, references = network(0.1), [network(work, noise=0.02) for work in WORK[::2]]
    plain = fitted(references, new)
    turned = fitted([measured(each) for each in references], measured(new))
    # Likelihoods are flat near their maximum, so parameters agree less closely than predictions.
    assert turned.predict(other * new.setups, unit * new.here_s) == pytest.approx(
        unit * plain.predict(new.setups, new.here_s), rel=0.01
    )


def test_intervals_hold_as_often_as_they_say():
    rng = np.random.default_rng(0)
    inside = []
    for seed in range(12):
        factors = np.exp(0.2 * rng.normal(size=len(WORK) + 1))
        steps = [
            scaled(network(work, noise=0.05, seed=seed), factor)
            for work, factor in zip((*WORK, 0.1), factors, strict=True)
        ]
        *references, new = steps
        low, high = fitted(references, new, [3]).interval(new.setups, new.here_s, coverage=0.8)
        inside.append(np.delete((low <= new.there_s) & (new.there_s <= high), 3))
    assert 0.65 < np.mean(inside) < 0.95


def test_intervals_are_around_forecasts_and_wider_far_from_probes():
    new = network(0.1)
    model = fitted([network(work, noise=0.05) for work in WORK], new, [0])
    middle = model.predict(new.setups, new.here_s)
    low, high = model.interval(new.setups, new.here_s)
    assert np.sqrt(low * high) == pytest.approx(middle, rel=1e-9)
    _, deviation = model._posterior(new.setups, new.here_s)
    assert np.log(high / middle) == pytest.approx(1.6449 * deviation, rel=1e-4)
    assert high[-1] / low[-1] > high[0] / low[0] > 1
    wider = model.interval(new.setups, new.here_s, coverage=0.99)
    assert (wider[0] < low).all()
    assert (wider[1] > high).all()


def test_a_second_network_forgets_the_first():
    references = [network(work) for work in WORK]
    model = fitted(references, scaled(network(0.1), 3.0))
    new = network(0.3)
    model.fit(taken(new, [0, 7]))
    fresh = fitted(references, new, [0, 7])
    assert (
        model.predict(new.setups, new.here_s).tolist()
        == fresh.predict(new.setups, new.here_s).tolist()
    )


# -- the Gaussian process itself -------------------------------------------------------------


PARAMS = np.array([0.3, 0.05, 0.02, 0.01, 0.4, 0.7])


def drawn(num=9, *, seed=0):
    rng = np.random.default_rng(seed)
    return _Steps(
        inputs=rng.normal(size=(num, 2)),
        network=rng.integers(3, size=num),
        ratios=rng.normal(size=num),
    )


def covariance(steps, one, other):
    """Return the covariance of two steps, one dimension at a time."""
    gap = sum(
        pace * (a - b) ** 2
        for pace, a, b in zip(PARAMS[4:], steps.inputs[one], steps.inputs[other], strict=True)
    )
    out = 4.0 + 0.3 * np.exp(-gap / 2)
    if steps.network[one] == steps.network[other]:
        out += 0.05 + 0.02 * np.exp(-gap / 2)
    return out


def test_it_is_what_a_joint_normal_distribution_says():
    steps = drawn()
    full = np.array([[covariance(steps, i, j) for j in range(9)] for i in range(9)])
    full += 0.01 * np.eye(9)
    known, asked = slice(0, 6), slice(6, 9)
    process = _Process.of(_Steps(*(each[known] for each in steps)), PARAMS)
    mean, variance = process(steps.inputs[asked], steps.network[asked])
    weights = full[asked, known] @ np.linalg.inv(full[known, known])
    assert mean == pytest.approx(weights @ steps.ratios[known], rel=1e-9)
    left = full[asked, asked] - weights @ full[known, asked]
    assert variance == pytest.approx(np.diag(left), rel=1e-6)


def test_surprise_is_the_density_of_what_was_measured():
    steps = drawn()
    full = np.array([[covariance(steps, i, j) for j in range(9)] for i in range(9)])
    full += 0.01 * np.eye(9)
    usual = np.log(PARAMS) + 0.3
    value, _ = _surprise(np.log(PARAMS), steps, usual)
    density = multivariate_normal(np.zeros(9), full).logpdf(steps.ratios)
    prior = 0.5 * 6 * (0.3 / 1.5) ** 2
    assert value == pytest.approx(prior - density - 4.5 * np.log(2 * np.pi), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_slopes_are_those_of_the_surprise(seed):
    steps, rng = drawn(seed=seed), np.random.default_rng(seed)
    logs, usual = np.log(PARAMS) + rng.normal(size=6), np.log(PARAMS)
    _, slopes = _surprise(logs, steps, usual)
    for at in range(6):
        step = 1e-5 * (np.arange(6) == at)
        ends = [_surprise(logs + sign * step, steps, usual)[0] for sign in (1, -1)]
        assert slopes[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-5)


def test_what_is_likeliest_is_found():
    """The most likely parameters are found, given far more steps than a prior can outweigh."""
    rng = np.random.default_rng(0)
    inputs, owner = 2 * rng.normal(size=(240, 1)), np.repeat(np.arange(24), 10)
    params = np.array([0.3, 0.1, 0.05, 0.002, 0.5])
    blank = _Steps(inputs=inputs, network=owner, ratios=np.zeros(240))
    full = np.sum(_parts(inputs, owner, known=blank, params=params), axis=0)
    drawn_ratios = rng.multivariate_normal(np.zeros(240), full + 0.002 * np.eye(240))
    found = _likeliest(blank._replace(ratios=drawn_ratios))
    assert np.log(found[1:] / params[1:]) == pytest.approx(np.zeros(4), abs=0.7)
    assert found[3] == pytest.approx(0.002, rel=0.25)  # the noise is estimated best


def test_rounding_leaves_the_noise():
    steps = drawn()
    many = _Steps(*(np.concatenate([each] * 30) for each in steps))
    process = _Process.of(many, PARAMS)
    shaken = process._replace(inverse=process.inverse * 1.1)
    assert (shaken(steps.inputs, steps.network)[1] == PARAMS[3]).all()


# -- errors ----------------------------------------------------------------------------------


def model_of_one_number():
    return fitted([network(work) for work in WORK[:2]], network(0.1))


def test_one_reference_does_not_say_how_networks_differ():
    with pytest.raises(UsageError, match="give at least two networks on both devices, got 1"):
        OtherDevice([network(0.1)])


def test_a_time_there_is_missing():
    with pytest.raises(UsageError, match=r"one time there for each .* not \(7,\) for \(8,\)"):
        PairedSteps(setups=BATCHES[:, None], here_s=BATCHES, there_s=BATCHES[1:])


def test_no_step_at_all():
    with pytest.raises(UsageError, match="of at least one time here"):
        PairedSteps(setups=np.zeros((0, 1)), here_s=np.zeros(0), there_s=np.zeros(0))


@pytest.mark.parametrize("setups", [BATCHES, BATCHES[1:, None]])
def test_setups_of_another_shape(setups):
    with pytest.raises(UsageError, match=r"must be \[steps, numbers\] and `seconds` \[steps\]"):
        _inputs(setups, BATCHES)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("name", ["setups", "here_s", "there_s"])
def test_numbers_that_are_not_positive(name, value):
    numbers = {"setups": BATCHES[:, None], "here_s": BATCHES, "there_s": BATCHES}
    numbers[name] = numbers[name].copy()
    numbers[name][2] = value
    with pytest.raises(UsageError, match="positive and finite"):
        PairedSteps(**numbers)


def test_setups_of_other_numbers():
    two = PairedSteps(setups=np.ones((8, 2)), here_s=BATCHES, there_s=BATCHES)
    wrong = "setups of 2 numbers, where the first network's have 1"
    with pytest.raises(UsageError, match=wrong):
        OtherDevice([network(0.1), two])
    model = model_of_one_number()
    with pytest.raises(UsageError, match=wrong):
        model.fit(two)
    with pytest.raises(UsageError, match=wrong):
        model.predict(two.setups, two.here_s)


@pytest.mark.parametrize("coverage", [0.0, 1.0])
def test_coverage_is_a_share(coverage):
    with pytest.raises(UsageError, match="`coverage` must be between 0 and 1"):
        model_of_one_number().interval(BATCHES[:, None], BATCHES, coverage=coverage)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match=r"scipy is not installed.*\.\[cloud\]"):
        OtherDevice([network(work) for work in WORK])
