"""No split ends sooner than the fastest one, and the energy-saving split needs no more joules."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.perf._draw import drawn
from tests.perf._workers import bounded_curves, fixed_seconds, jobs, powers, seconds
from thrifty.core import UsageError
from thrifty.perf import Power, StepCurve, forecast_split, split_batch, split_for_energy


pytestmark = pytest.mark.slow


def splits(curves, batch):
    """Return all splits into whole numbers within the bounds."""
    mosts = [
        batch if curve.max_samples is None else min(batch, curve.max_samples) for curve in curves
    ]
    ranges = [
        range(curve.min_samples, max_samples + 1)
        for curve, max_samples in zip(curves, mosts, strict=True)
    ]
    return [sizes for sizes in itertools.product(*ranges) if sum(sizes) == batch]


@given(jobs())
@settings(drawn, max_examples=draws(125, 500))
def test_no_split_ends_sooner(job):
    curves, batch = job
    split, possible = split_batch(curves, batch), splits(curves, batch)
    assert split in possible
    shortest = min(forecast_split(curves, sizes).step_s for sizes in possible)
    assert forecast_split(curves, split).step_s <= shortest * (1 + 1e-12)


@given(
    st.lists(st.builds(StepCurve, sample_s=seconds, fixed_s=fixed_seconds), min_size=1, max_size=8),
    st.integers(1, 10**5),
)
@drawn
def test_less_time_is_too_little_for_a_large_batch(curves, batch):
    split = split_batch(curves, batch)
    assert sum(split) == batch
    assert min(split) >= 0
    less = Fraction(forecast_split(curves, split).step_s) * (1 - Fraction(1, 10**12))
    possible = [
        math.floor((less - Fraction(curve.fixed_s)) / Fraction(curve.sample_s)) for curve in curves
    ]
    assert sum(max(0, size) for size in possible) < batch


@given(seconds, fixed_seconds, st.integers(1, 9), st.integers(1, 1000))
@drawn
def test_equal_workers_get_equal_parts(sample_s, fixed_s, workers, batch):
    split = split_batch([StepCurve(sample_s=sample_s, fixed_s=fixed_s)] * workers, batch)
    assert max(split) - min(split) <= 1


@given(jobs(), st.integers(-20, 20))
@drawn
def test_another_unit_of_time_changes_nothing(job, power):
    # Powers of two scale without rounding errors.
    curves, batch = job
    scaled = [curve.scaled(2.0**power) for curve in curves]
    assert split_batch(scaled, batch) == split_batch(curves, batch)


@given(jobs(), st.floats(1e-3, 1e3))
@drawn
def test_the_step_takes_as_many_times_as_long_as_each_worker(job, factor):
    # Rounding may break a tie between workers differently, but the step time is the same.
    curves, batch = job
    scaled = [curve.scaled(factor) for curve in curves]
    step_s = forecast_split(scaled, split_batch(scaled, batch)).step_s
    expected = factor * forecast_split(curves, split_batch(curves, batch)).step_s
    assert step_s == pytest.approx(expected, rel=1e-9)


def test_all_end_together():
    curves = [
        StepCurve(sample_s=1.0, fixed_s=2.0),
        StepCurve(sample_s=2.0, fixed_s=4.0),
        StepCurve(sample_s=0.5),
    ]
    assert split_batch(curves, 38) == (10, 4, 24)
    assert forecast_split(curves, (10, 4, 24)).step_s == 12.0


def test_a_worker_that_makes_the_step_slower_is_left_out_unless_it_has_to_be_given_some():
    fast, slow = StepCurve(sample_s=1.0), StepCurve(sample_s=20.0)
    assert split_batch([fast, slow], 8) == (8, 0)
    assert split_batch([fast, StepCurve(sample_s=20.0, min_samples=2)], 8) == (6, 2)


def test_each_gets_its_least_where_the_samples_take_next_to_nothing():
    # A step takes 1 s, with one sample as with ten.
    split = split_batch([StepCurve(sample_s=1e-18, fixed_s=1.0, min_samples=2)] * 2, 10)
    assert (sum(split), min(split) >= 2) == (10, True)


def test_what_does_not_fit_into_one_goes_to_the_others():
    fast, slow = StepCurve(sample_s=1.0, max_samples=3), StepCurve(sample_s=3.0)
    assert split_batch([fast, slow, slow], 9) == (3, 3, 3)


@given(jobs(), st.lists(powers, min_size=3, max_size=3))
@settings(drawn, max_examples=draws(75, 300))
def test_the_thrifty_split_needs_no_more_joules_than_the_quick_one(job, watts):
    (curves, batch), watts = job, watts[: len(job[0])]
    split = split_for_energy(curves, watts, batch)
    assert split in splits(curves, batch)
    quick = forecast_split(curves, split_batch(curves, batch), powers=watts)
    assert forecast_split(curves, split, powers=watts).joules <= quick.joules


@given(jobs(bounded_curves(fixed_s=st.just(0.0))), st.lists(powers, min_size=3, max_size=3))
@settings(drawn, max_examples=draws(75, 300))
def test_the_thrifty_split_is_near_the_best_where_nothing_is_fixed(job, watts):
    (curves, batch), watts = job, watts[: len(job[0])]

    def joules(sizes):
        return forecast_split(curves, sizes, powers=watts).joules

    fewest = min(joules(sizes) for sizes in splits(curves, batch))
    assert joules(split_for_energy(curves, watts, batch)) <= 1.05 * fewest


def test_waiting_costs_energy_too():
    fast, slow = StepCurve(sample_s=1.0), StepCurve(sample_s=4.0)
    # The slow worker takes 8 J for a sample and the fast one 10 J, and both wait for the slow one.
    patient = [Power(idle_w=0.0, busy_w=10.0), Power(idle_w=0.0, busy_w=2.0)]
    assert split_for_energy([fast, slow], patient, 10) == (0, 10)
    restless = [Power(idle_w=1.0, busy_w=11.0), Power(idle_w=0.0, busy_w=2.0)]
    assert split_for_energy([fast, slow], restless, 10) == (8, 2)


def test_energy_is_least_where_one_worker_is_just_no_longer_needed():
    # A sample takes 10, 20 or 50 J. Each further second saves 50 J, later 5 J, and costs 20 J of
    # waiting.
    curves = [StepCurve(sample_s=2.0), StepCurve(sample_s=1.0), StepCurve(sample_s=0.5)]
    watts = [
        Power(idle_w=10.0, busy_w=15.0),
        Power(idle_w=10.0, busy_w=30.0),
        Power(idle_w=0.0, busy_w=100.0),
    ]
    # approximate, since not every step time is tried
    assert split_for_energy(curves, watts, 1000) == pytest.approx((333, 667, 0), abs=5)


def test_what_a_worker_takes_to_begin_counts_where_the_quick_split_spares_it():
    # Both take 4 s for one sample; only a second sample would be cheaper on the first worker.
    curves = [StepCurve(sample_s=1.0, fixed_s=3.0), StepCurve(sample_s=4.0)]
    watts = [Power(idle_w=0.0, busy_w=10.0), Power(idle_w=0.0, busy_w=5.0)]
    assert split_for_energy(curves, watts, 1) == (0, 1)


def test_of_equal_energies_the_shorter_step_is_taken():
    curves = [StepCurve(sample_s=1.0), StepCurve(sample_s=2.0)]
    watts = [Power(idle_w=0.0, busy_w=10.0), Power(idle_w=0.0, busy_w=5.0)]
    assert split_for_energy(curves, watts, 9) == (6, 3)


def test_the_thriftiest_worker_may_take_the_whole_batch():
    curves = [StepCurve(sample_s=0.1, fixed_s=2.0), StepCurve(sample_s=3.0, fixed_s=0.5)]
    watts = [Power(idle_w=0.0, busy_w=10.0), Power(idle_w=0.0, busy_w=0.0)]
    assert split_for_energy(curves, watts, 9) == (0, 9)


def test_a_forecast_is_that_of_the_slowest_and_of_all_joules():
    curves = [StepCurve(sample_s=1.0, fixed_s=1.0), StepCurve(sample_s=3.0)]
    assert forecast_split(curves, (3, 2)) == (6.0, None)
    watts = [Power(idle_w=1.0, busy_w=10.0), Power(idle_w=2.0, busy_w=5.0)]
    # The first worker waits 2 s of 6, the second one never.
    assert forecast_split(curves, (3, 2), powers=watts) == (6.0, 42.0 + 30.0)
    # A worker that is left out waits.
    assert forecast_split(curves, (0, 1), powers=watts) == (3.0, 3.0 + 15.0)


def quickly(curves, batch):
    return split_batch(curves, batch)


def thriftily(curves, batch):
    return split_for_energy(curves, [Power(idle_w=1.0, busy_w=2.0)] * len(curves), batch)


@pytest.mark.parametrize("split", [quickly, thriftily])
@pytest.mark.parametrize(
    ("curves", "batch", "message"),
    [
        ([], 8, "there is no worker to give a batch to"),
        ([StepCurve(sample_s=1.0)], 0, "`batch` must be at least 1, got 0"),
        (
            [StepCurve(sample_s=1.0, max_samples=3), StepCurve(sample_s=1.0, max_samples=4)],
            8,
            r"a global batch of 8 samples does not fit these 2 workers.* hold 7 at most",
        ),
        (
            [StepCurve(sample_s=1.0, min_samples=3), StepCurve(sample_s=1.0, min_samples=4)],
            6,
            r"a global batch of 6 samples does not fit these 2 workers.* given 7 at least",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(split, curves, batch, message):
    with pytest.raises(UsageError, match=message):
        split(curves, batch)


def test_bounds_that_just_allow_the_batch_are_enough():
    tight = [
        StepCurve(sample_s=1.0, min_samples=3, max_samples=3),
        StepCurve(sample_s=2.0, min_samples=4, max_samples=4),
    ]
    assert quickly(tight, 7) == thriftily(tight, 7) == (3, 4)


def test_each_worker_has_a_power():
    with pytest.raises(UsageError, match="2 workers have 1 powers; give one for each"):
        split_for_energy([StepCurve(sample_s=1.0)] * 2, [Power(idle_w=1.0, busy_w=2.0)], 8)
