"""The most efficient batch size for unequal workers, and learning rates that scale with it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from thrifty.core import HeteroError
from thrifty.hetero import BatchScaling, StepCurve


# Whole seconds, so that the floors are exact.
times = st.tuples(st.integers(1, 20), st.integers(0, 200))
efficiencies = st.sampled_from([0.1, 0.25, 0.6, 0.9])


def efficient(sample_s, fixed_s, efficiency):
    """Find the smallest batch with this efficiency by trying each size."""
    size = 1
    while sample_s * size < efficiency * (fixed_s + sample_s * size) - 1e-9:
        size += 1
    return size


def curve(sample_s, fixed_s):
    return StepCurve(sample_s=float(sample_s), fixed_s=float(fixed_s))


@given(times, efficiencies)
def test_one_worker_gets_the_smallest_batch_that_is_efficient(time, efficiency):
    batch = BatchScaling(efficiency=efficiency).batch([curve(*time)], 1)
    assert batch == efficient(*time, efficiency)


@given(st.lists(times, min_size=1, max_size=4), efficiencies, st.integers(1, 200))
def test_every_worker_is_as_efficient_as_asked(workers, efficiency, base):
    batch = BatchScaling(efficiency=efficiency).batch([curve(*time) for time in workers], base)
    knees = [efficient(*time, efficiency) for time in workers]
    slowest = max(
        fixed + sample * knee for (sample, fixed), knee in zip(workers, knees, strict=True)
    )
    sizes = [(slowest - fixed) // sample for sample, fixed in workers]
    assert all(size >= knee for size, knee in zip(sizes, knees, strict=True))
    assert batch == max(base, sum(sizes))


def test_the_others_get_what_they_train_in_the_time_of_the_slowest():
    slow, fast = StepCurve(sample_s=0.1, fixed_s=1.0), StepCurve(sample_s=0.01, fixed_s=0.1)
    growth = BatchScaling(efficiency=0.5)
    assert growth.batch([slow], 1) == 10
    assert growth.batch([fast], 1) == 10
    # The slow worker takes 2 s for its 10 samples.
    assert growth.batch([slow, fast], 1) == 10 + 190


def test_the_batch_is_bounded():
    workers = [StepCurve(sample_s=0.01, fixed_s=0.1)] * 2
    assert BatchScaling(max_batch=100).batch(workers, 64) == 100
    assert BatchScaling(max_batch=50).batch(workers, 64) == 64
    full = [StepCurve(sample_s=0.01, fixed_s=0.1, max_samples=20)] * 2
    assert BatchScaling().batch(full, 16) == 40


def test_the_rate_follows_the_batch():
    assert BatchScaling().factor(batch=64, base=16, step=0) == 4.0
    assert BatchScaling(rule="sqrt").factor(batch=64, base=16, step=0) == 2.0
    assert BatchScaling(rule="none").factor(batch=64, base=16, step=0) == 1.0


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_the_rate_grows_step_by_step_while_it_warms_up(rule):
    growth = BatchScaling(rule=rule, warmup_steps=4)
    rates = [growth.factor(batch=64, base=16, step=step) for step in range(7)]
    whole = 4.0 if rule == "linear" else 2.0
    steps = [1 + (whole - 1) * step / 4 for step in range(4)]
    assert rates == pytest.approx([*steps, whole, whole, whole])
    assert BatchScaling(rule="none", warmup_steps=4).factor(batch=64, base=16, step=2) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "cubic"}, "must be 'linear', 'sqrt' or 'none', got 'cubic'"),
        ({"efficiency": 0.0}, "`efficiency` must be between 0 and 1, got 0.0"),
        ({"efficiency": 1.0}, "`efficiency` must be between 0 and 1, got 1.0"),
        ({"warmup_steps": -1}, "warmup_steps is not negative"),
        ({"max_batch": 0}, "max_batch is at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(HeteroError, match=message):
        BatchScaling(**options)
