"""Profiles of a step between and beyond the measured sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf import StepProfile


pytestmark = pytest.mark.slow


PROFILE = StepProfile(
    device="here",
    batches=(4, 8, 16),
    forward_s=(1.0, 1.5, 3.5),
    backward_s=(2.0, 3.0, 7.0),
    optimizer_s=0.5,
    peak_bytes=(100.0, 140.0, 220.0),
    bucket_bytes=(10.0, 30.0),
    bucket_ready=(0.25, 1.0),
    sample_input_s=0.01,
    overhead_s=0.125,
)


@st.composite
def profiles(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    grows = st.lists(st.integers(1, 20), min_size=len(sizes), max_size=len(sizes))
    forward, backward, peak = (np.cumsum(draw(grows)).astype(float) for _ in range(3))
    return replace(
        PROFILE,
        batches=tuple(sizes),
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        peak_bytes=tuple(peak),
    )


@given(profiles())
@drawn
def test_what_was_measured_is_what_it_says(profile):
    for at, measured in (
        (profile.forward_at, profile.forward_s),
        (profile.backward_at, profile.backward_s),
        (profile.peak_at, profile.peak_bytes),
    ):
        assert at(profile.batches) == pytest.approx(measured)


def test_between_sizes_and_beyond_them_it_goes_along_straight_lines():
    assert PROFILE.forward_at([6, 12]).tolist() == [1.25, 2.5]
    assert PROFILE.forward_at([2, 24]).tolist() == [0.75, 5.5]
    assert PROFILE.backward_at(10) == 4.0
    assert PROFILE.peak_at(32) == 380.0


def test_nothing_is_below_zero():
    steep = replace(PROFILE, batches=(4, 5, 6), forward_s=(0.5, 1.5, 2.5))
    assert steep.forward_at([1, 3, 4]).tolist() == [0.0, 0.0, 0.5]


def test_one_size_stands_for_all_others():
    one = replace(PROFILE, batches=(8,), forward_s=(2.0,), backward_s=(1.0,), peak_bytes=(9.0,))
    assert one.forward_at([4, 8, 16]).tolist() == [1.0, 2.0, 4.0]


@given(profiles(), st.floats(0, 200))
@drawn
def test_the_largest_batch_that_fits(profile, memory):
    max_batch = 0
    while profile.high_peak_at(max_batch + 1) <= memory:
        max_batch += 1
    assert profile.max_batch(memory) == max_batch


def test_the_upper_end_of_memory_has_the_error_the_distance_from_a_line_and_the_gradient():
    # These peaks lie on a line, and the gradient has 40 bytes.
    assert PROFILE.high_peak_at(32) == pytest.approx(1.1 * 380 + 40)
    known = replace(PROFILE, peak_error=0.0)
    assert known.high_peak_at([4, 16]).tolist() == pytest.approx([140.0, 260.0])
    bent = replace(known, batches=(1, 2, 3), peak_bytes=(100.0, 100.0, 200.0))
    line, *_ = np.polynomial.polynomial.polyfit(
        [1, 2, 3], [100, 100, 200], 1, w=[1 / 100, 1 / 100, 1 / 200], full=True
    )
    far = max(abs((line[0] + line[1] * b) / peak - 1) for b, peak in ((1, 100), (2, 100), (3, 200)))
    assert far > 0.1
    assert bent.high_peak_at(2) == pytest.approx((1 + far) * 100 + 40)


def test_memory_that_was_not_measured_needs_nothing():
    unknown = replace(PROFILE, peak_bytes=(0.0, 0.0, 0.0))
    assert unknown.high_peak_at([1, 99]).tolist() == [0.0, 0.0]


def test_memory_that_no_batch_fills():
    assert PROFILE.max_batch(math.inf) >= 2**29
    assert replace(PROFILE, peak_bytes=(0.0, 0.0, 0.0)).max_batch(1.0) >= 2**29


def test_a_slower_device_takes_longer_for_all_but_reading():
    slow = PROFILE.slowed(2.0, device="there")
    assert (slow.device, slow.optimizer_s, slow.overhead_s) == ("there", 1.0, 0.25)
    assert slow.forward_s == (2.0, 3.0, 7.0)
    assert slow.backward_s == (4.0, 6.0, 14.0)
    assert (slow.sample_input_s, slow.peak_bytes) == (0.01, PROFILE.peak_bytes)


@given(profiles())
@drawn
def test_it_comes_back_from_json(profile):
    assert StepProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**PROFILE.to_json(), "colour": "red"},
        {**PROFILE.to_json(), "batches": "few"},
        {**PROFILE.to_json(), "batches": ["a", "b", "c"]},
        {**PROFILE.to_json(), "optimizer_s": None},
        {**PROFILE.to_json(), "forward_s": 3.0},
        [1, 2],
    ],
)
def test_what_is_no_profile(data):
    with pytest.raises(UsageError, match="this is no step profile"):
        StepProfile.from_json(data)


def test_a_profile_that_was_altered_says_what_is_wrong():
    with pytest.raises(UsageError, match=r"^times forward and backward are positive"):
        StepProfile.from_json({**PROFILE.to_json(), "forward_s": [1.0, 2.0, -3.0]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "`batches` must ascend from 1 or more"),
        ({"batches": (8, 4, 16)}, "`batches` must ascend from 1 or more"),
        ({"batches": (4, 4, 16)}, "`batches` must ascend from 1 or more"),
        ({"batches": (0, 4, 16)}, "`batches` must ascend from 1 or more"),
        ({"batches": (4, math.nan, 16)}, "`batches` must ascend from 1 or more"),
        ({"batches": (4, 8, math.inf)}, "`batches` must ascend from 1 or more"),
        ({"forward_s": (1.0, 2.0)}, r"each of 3 batches has .* not \[2, 3, 3\]"),
        ({"peak_bytes": (1.0,)}, r"each of 3 batches has .* not \[3, 3, 1\]"),
        ({"forward_s": (1.0, 0.0, 2.0)}, "times forward and backward are positive"),
        ({"backward_s": (1.0, math.inf, 2.0)}, "times forward and backward are positive"),
        ({"optimizer_s": -1.0}, "times and bytes are finite and not negative"),
        ({"sample_input_s": math.nan}, "times and bytes are finite and not negative"),
        ({"overhead_s": math.inf}, "times and bytes are finite and not negative"),
        (
            {"precision": "float8"},
            "`precision` must be one of float32, bfloat16, float16, got 'float8'",
        ),
        ({"peak_error": -0.1}, "times and bytes are finite and not negative"),
        ({"peak_bytes": (1.0, -1.0, 2.0)}, "times and bytes are finite and not negative"),
        ({"bucket_bytes": (-1.0, 2.0)}, "times and bytes are finite and not negative"),
        ({"bucket_bytes": (1.0,)}, "each bucket has its bytes and its moment, not 1 and 2"),
        ({"bucket_bytes": (), "bucket_ready": ()}, "each bucket has its bytes"),
        ({"bucket_ready": (0.5, 0.25)}, "`bucket_ready` must ascend from 0 to 1"),
        ({"bucket_ready": (-0.5, 1.0)}, "`bucket_ready` must ascend from 0 to 1"),
        ({"bucket_ready": (0.5, 1.5)}, "`bucket_ready` must ascend from 0 to 1"),
        (
            {"bucket_bytes": (1.0, 1.0, 1.0), "bucket_ready": (0.5, math.nan, 1.0)},
            "`bucket_ready` must ascend from 0 to 1",
        ),
    ],
)
def test_numbers_that_do_not_fit_together(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(PROFILE, **changes)
