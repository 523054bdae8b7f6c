"""Lines fitted to measured steps: predictions, and the batch that fits into a given time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.perf._draw import drawn
from tests.perf._workers import bounded_curves, fixed_seconds, round_seconds, seconds
from thrifty.core import UsageError
from thrifty.perf import StepCurve


pytestmark = pytest.mark.slow


sizes = st.integers(1, 1000)
measured = st.lists(sizes, min_size=1, max_size=6, unique=True)


@given(fixed_seconds, seconds, st.integers(2, 8))
@drawn
def test_an_exact_line_is_found(fixed_s, sample_s, count):
    batches = [2**power for power in range(count)]
    curve = StepCurve.fit(batches, [fixed_s + sample_s * batch for batch in batches])
    assert curve.fixed_s == pytest.approx(fixed_s, abs=1e-9 * (fixed_s + sample_s))
    assert curve.sample_s == pytest.approx(sample_s, abs=1e-9 * (fixed_s + sample_s))


@given(st.lists(st.tuples(sizes, st.floats(1e-6, 1e3)), min_size=1, max_size=6))
@drawn
def test_no_fit_is_negative_whatever_was_measured(points):
    curve = StepCurve.fit(*zip(*points, strict=True))
    assert curve.fixed_s >= 0
    assert curve.sample_s > 0


@given(
    measured.map(sorted),
    st.lists(sizes, min_size=6, max_size=6, unique=True).map(sorted),
    fixed_seconds,
    seconds,
)
@settings(drawn, max_examples=draws(75, 300))
def test_no_line_is_nearer_to_steps_that_grow_with_the_batch(batches, times, fixed_s, sample_s):
    def error(curve):
        points = zip(batches, times, strict=False)
        return sum((curve.seconds(batch) / time - 1) ** 2 for batch, time in points)

    best = StepCurve.fit(batches, times[: len(batches)])
    others = [
        StepCurve(fixed_s=fixed_s, sample_s=sample_s),
        StepCurve(fixed_s=best.fixed_s, sample_s=best.sample_s * 1.01),
        StepCurve(fixed_s=best.fixed_s, sample_s=best.sample_s / 1.01),
        StepCurve(fixed_s=best.fixed_s + 0.01 * times[0], sample_s=best.sample_s),
        StepCurve(fixed_s=max(0, best.fixed_s - 0.01 * times[0]), sample_s=best.sample_s),
    ]
    assert error(best) <= min(error(other) for other in others) + 1e-9


def test_one_size_makes_a_line_through_nothing():
    assert StepCurve.fit([8], [2.0]) == StepCurve(sample_s=0.25)


def test_a_line_below_nothing_goes_through_nothing():
    curve = StepCurve.fit([1, 2, 4], [1.0, 4.0, 16.0])
    assert curve.fixed_s == 0.0
    # The least-squares solution of b / t * sample_s - 1 at b / t = 1, 1/2, 1/4.
    assert curve.sample_s == pytest.approx(1.75 / 1.3125)


@pytest.mark.parametrize("times", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.999, 0.998, 0.997]])
def test_steps_that_do_not_grow_are_nearly_all_fixed(times):
    curve = StepCurve.fit([1, 2, 4, 8], times)
    assert [curve.seconds(batch) for batch in (1, 2, 4, 8)] == pytest.approx(times, rel=0.01)


def test_a_fit_keeps_the_bounds():
    curve = StepCurve.fit([1, 2], [1.0, 2.0], max_samples=8, min_samples=3)
    assert (curve.max_samples, curve.min_samples) == (8, 3)


def test_a_step_without_samples_takes_no_time():
    curve = StepCurve(sample_s=0.5, fixed_s=2.0)
    assert [curve.seconds(batch) for batch in (0, 1, 4)] == [0.0, 2.5, 4.0]


@given(bounded_curves(), st.floats(0.01, 100.0), sizes)
@drawn
def test_a_scaled_worker_is_slower_and_otherwise_the_same(curve, factor, batch):
    slow = curve.scaled(factor)
    assert slow.seconds(batch) == pytest.approx(factor * curve.seconds(batch))
    assert slow.fixed_s == pytest.approx(factor * curve.fixed_s)
    assert (slow.max_samples, slow.min_samples) == (curve.max_samples, curve.min_samples)


@given(
    bounded_curves(round_seconds, st.sampled_from([0.0, 0.5, 2.0])),
    st.integers(0, 400),
    st.integers(3, 30),
)
@settings(drawn, max_examples=draws(75, 300))
def test_the_capacity_is_the_largest_batch_that_ends_in_time(curve, eighths, batch):
    max_samples = batch if curve.max_samples is None else min(batch, curve.max_samples)
    in_time = [size for size in range(max_samples + 1) if curve.seconds(size) <= eighths / 8]
    assert curve.capacity(eighths / 8, batch) == max(curve.min_samples, *in_time, 0)


@given(bounded_curves(), st.floats(0.0, 200.0), sizes)
@drawn
def test_what_fits_ends_in_time_within_the_bounds(curve, time_s, batch):
    max_samples = batch if curve.max_samples is None else min(batch, curve.max_samples)
    size = curve.capacity(time_s, batch)
    assert min(curve.min_samples, max_samples) <= size <= max_samples
    if size > curve.min_samples:
        assert curve.seconds(size) <= time_s * (1 + 1e-12)
    if size < max_samples:
        assert curve.seconds(size + 1) >= time_s * (1 - 1e-12)


@given(fixed_seconds, seconds, sizes)
@drawn
def test_a_batch_fits_into_its_own_time(fixed_s, sample_s, batch):
    curve = StepCurve(fixed_s=fixed_s, sample_s=sample_s)
    assert curve.capacity(curve.seconds(batch), 10 * batch) >= batch


def test_a_worker_whose_samples_take_next_to_nothing_has_a_capacity():
    curve = StepCurve(sample_s=1e-310, fixed_s=1.0)
    assert (curve.capacity(0.5, 10), curve.capacity(1.0, 10)) == (0, 10)


def test_any_time_is_enough_for_the_least_and_none_for_more_than_the_most():
    curve = StepCurve(sample_s=1.0, max_samples=8, min_samples=2)
    assert [curve.capacity(time_s, 100) for time_s in (0.0, 1.5, math.inf)] == [2, 2, 8]
    assert curve.capacity(math.inf, 5) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_s": 0.0}, "`sample_s` must be positive and finite, got 0.0"),
        ({"sample_s": -1.0}, "`sample_s` must be positive and finite, got -1.0"),
        ({"sample_s": math.inf}, "`sample_s` must be positive and finite, got inf"),
        ({"sample_s": math.nan}, "`sample_s` must be positive and finite, got nan"),
        ({"fixed_s": -0.5}, "`fixed_s` must be finite and not negative, got -0.5"),
        ({"fixed_s": math.inf}, "`fixed_s` must be finite and not negative, got inf"),
        ({"fixed_s": math.nan}, "`fixed_s` must be finite and not negative, got nan"),
        (
            {"min_samples": -1},
            (
                "0 <= min_samples <= max_samples and 1 <= max_samples, not min_samples=-1, "
                "max_samples=None"
            ),
        ),
        ({"min_samples": 3, "max_samples": 2}, "not min_samples=3, max_samples=2"),
        ({"max_samples": 0}, "not min_samples=0, max_samples=0"),
    ],
)
def test_what_is_no_curve_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        StepCurve(**{"sample_s": 1.0, **changes})


@pytest.mark.parametrize(
    ("batches", "times", "message"),
    [
        ([], [], "0 batch sizes and 0 times make no curve"),
        ([1, 2], [1.0], "2 batch sizes and 1 times make no curve"),
        ([0, 2], [1.0, 1.0], "batch sizes and times of steps are positive and finite"),
        ([1, 2], [1.0, 0.0], "batch sizes and times of steps are positive and finite"),
        ([1, 2], [1.0, math.nan], "batch sizes and times of steps are positive and finite"),
        ([1, math.inf], [1.0, 2.0], "batch sizes and times of steps are positive and finite"),
        ([1, 2], [1.0, math.inf], "batch sizes and times of steps are positive and finite"),
    ],
)
def test_what_was_not_measured_makes_no_curve(batches, times, message):
    with pytest.raises(UsageError, match=message):
        StepCurve.fit(batches, times)
