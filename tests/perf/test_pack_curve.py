from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import amounts, curves, drawn
from thrifty.core import UsageError
from thrifty.perf import PackCurve


pytestmark = pytest.mark.slow


ks = st.integers(1, 100)


@given(curves())
@drawn
def test_measured_points_are_exact(curve):
    assert {k: curve.time(k) for k in curve.step_s} == curve.step_s
    assert {k: curve.memory(k) for k in curve.memory_bytes} == curve.memory_bytes


@given(curves())
@drawn
def test_time_goes_straight_from_point_to_point(curve):
    points = sorted(curve.step_s.items())
    for (k1, t1), (k2, t2) in itertools.pairwise(points):
        times = [curve.time(k) for k in range(k1, k2 + 1)]
        line = [t1 + (t2 - t1) * i / (k2 - k1) for i in range(k2 - k1 + 1)]
        assert times == pytest.approx(line, rel=1e-12)
        assert times == pytest.approx(sorted(times, reverse=t2 < t1), rel=1e-12)


@given(curves(), ks)
@drawn
def test_time_outside_the_measured_points(curve, k):
    first, last = min(curve.step_s), max(curve.step_s)
    if k < first:
        assert curve.time(k) == curve.step_s[first]
    if k >= last:
        assert curve.per_trial(k) == pytest.approx(curve.per_trial(last))


@given(curves())
@drawn
def test_memory_never_decreases(curve):
    taken = [curve.memory(k) for k in range(1, 100)]
    assert taken == sorted(taken)


@given(amounts, amounts, ks)
@drawn
def test_memory_beyond_two_points_is_hydros_rule(one, more, k):
    curve = PackCurve(backend="fused", step_s={1: 1.0}, memory_bytes={1: one, 2: one + more})
    assert curve.memory(k) == pytest.approx(one + (k - 1) * more)


def test_memory_of_one_point_is_that_of_each_trial():
    curve = PackCurve(backend="fused", step_s={1: 1.0}, memory_bytes={2: 6.0})
    assert [curve.memory(k) for k in (1, 2, 5)] == [3.0, 6.0, 15.0]


def test_memory_stays_between_its_measured_neighbours():
    curve = PackCurve(
        backend="fused", step_s={1: 1.0}, memory_bytes={1: 10.0, 2: 20.0, 4: 25.0, 8: 500.0}
    )
    assert [curve.memory(k) for k in (3, 4, 6, 9)] == [25.0, 25.0, 60.0, 500.0]


def test_memory_that_shrinks_is_noise():
    curve = PackCurve(backend="fused", step_s={1: 1.0}, memory_bytes={1: 10.0, 2: 9.0})
    assert curve.memory(5) == 10.0


@given(curves(), st.floats(1.0, 1e12), st.integers(1, 100))
@drawn
def test_the_largest_is_the_last_that_fits(curve, cap, limit):
    fitting = [k for k in range(1, limit + 1) if curve.fits(k, cap_bytes=cap, margin=0.8)]
    largest = curve.largest(cap_bytes=cap, margin=0.8, limit=limit)
    assert largest == max(fitting, default=1)


def test_anything_fits_where_no_memory_was_measured():
    curve = PackCurve(backend="solo", step_s={1: 1.0})
    assert curve.memory(9) == 0.0
    assert curve.largest(cap_bytes=1.0, limit=9) == 9


@given(curves())
@drawn
def test_json_gives_the_curve_back(curve):
    assert PackCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "quantum"}, r"no back-end 'quantum'.*fused, concatenated, solo"),
        ({"step_s": {}}, "at least one measured step"),
        ({"step_s": {0: 1.0}}, r"step_s\[0\] = 1.0.*measure it again"),
        ({"step_s": {1: 0.0}}, r"step_s\[1\] = 0.0"),
        ({"step_s": {1: math.nan}}, r"step_s\[1\] = nan"),
        ({"memory_bytes": {2: math.inf}}, r"memory_bytes\[2\] = inf"),
    ],
)
def test_what_is_no_measurement_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        PackCurve(**{"backend": "fused", "step_s": {1: 1.0}, **changes})


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"backend": "solo", "step_s": {"1": 1.0}},
        {"backend": "solo", "step_s": [1.0], "memory_bytes": {}},
        {"backend": "solo", "step_s": {"one": 1.0}, "memory_bytes": {}},
        {"backend": "solo", "step_s": {"1": None}, "memory_bytes": {}},
    ],
)
def test_json_of_something_else_is_refused(data):
    with pytest.raises(UsageError, match="this is no pack curve"):
        PackCurve.from_json(data)
