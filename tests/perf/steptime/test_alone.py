"""Step time of one device as a function of its batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tests.perf._draw import drawn
from thrifty.perf.steptime import Setup
from thrifty.perf.steptime._model import Columns, SingleDeviceTime


profiles = st.dictionaries(st.integers(1, 500), st.floats(1e-3, 10.0), min_size=1, max_size=6)


def alone(*rows):
    """Return a model of one device, fitted to (placement, batch, seconds)."""
    setups = [Setup(placement=placement, batch=batch) for placement, batch, _ in rows]
    return SingleDeviceTime(Columns.of(setups), np.array([seconds for *_, seconds in rows], float))


def of_one(profile):
    return alone(*[((1,), batch, seconds) for batch, seconds in profile.items()])


def at(model, *batches):
    return model(np.array(batches, float)).tolist()


@drawn
@given(profiles)
def test_measured_sizes_take_what_was_measured(profile):
    assert at(of_one(profile), *profile) == pytest.approx(list(profile.values()))


def test_several_measurements_of_one_size_are_averaged():
    model = alone(((1,), 8, 1.0), ((1,), 8, 2.0), ((1,), 16, 5.0))
    assert at(model, 8, 16) == pytest.approx([1.5, 5.0])


@drawn
@given(profiles, st.floats(0.0, 1.0))
def test_between_two_sizes_logarithms_are_a_straight_line(profile, share):
    model = of_one(profile)
    sizes = sorted(profile)
    for low, high in pairwise(sizes):
        batch = low ** (1 - share) * high**share
        expected = profile[low] ** (1 - share) * profile[high] ** share
        assert at(model, batch) == pytest.approx([expected])


@settings(drawn, max_examples=50)
@given(st.floats(0.01, 1.0), st.floats(1e-4, 0.1))
def test_beyond_the_sizes_a_line_is_followed(fixed, sample):
    model = of_one({batch: fixed + sample * batch for batch in (8, 16, 64)})
    wanted = [fixed + sample * batch for batch in (1, 4, 100, 5000)]
    assert at(model, 1, 4, 100, 5000) == pytest.approx(wanted, rel=1e-4)


@drawn
@example({499: 1e-3, 500: 10.0})
@given(profiles)
def test_there_is_no_jump_at_either_end(profile):
    model = of_one(profile)
    # Between sizes 499 and 500 a time may grow by a factor of 10,000, so compare sizes that are
    # very close.
    for end in (min(profile), max(profile)):
        near = at(model, end * (1 - 1e-12), end * (1 + 1e-12))
        assert near == pytest.approx([profile[end]] * 2)


@pytest.mark.parametrize("copies", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 7.7])
def test_of_one_size_half_is_fixed_and_half_grows(copies, seconds):
    model = alone(*[((1,), 8, seconds)] * copies)
    wanted = [0.75 * seconds, seconds, 1.5 * seconds, 2.5 * seconds]
    assert at(model, 4, 8, 16, 32) == pytest.approx(wanted, rel=1e-3)


def test_a_larger_placement_says_nothing_of_one_device():
    assert at(alone(((1,), 8, 1.0), ((2,), 8, 9.0), ((1, 1), 16, 9.0)), 8) == pytest.approx([1.0])


def test_the_smallest_placements_stand_in_for_one_device():
    model = alone(((2,), 8, 1.0), ((1, 1), 8, 3.0), ((1, 1), 16, 5.0), ((4,), 8, 99.0))
    assert at(model, 8, 16) == pytest.approx([2.0, 5.0])
