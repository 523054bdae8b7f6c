"""Energy in joules of a worker that works and waits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from tests.perf._workers import powers
from thrifty.core import UsageError
from thrifty.perf import Power


@given(powers, st.floats(0.0, 100.0), st.floats(0.0, 100.0))
@drawn
def test_it_waits_while_it_does_not_work(power, busy_s, waits_s):
    joules = power.joules(busy_s=busy_s, whole_s=busy_s + waits_s)
    assert joules == pytest.approx(power.busy_w * busy_s + power.idle_w * waits_s)


@pytest.mark.parametrize(
    ("idle_w", "busy_w"),
    [(-1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_what_is_no_power_is_refused(idle_w, busy_w):
    message = (
        f"watts must be finite with 0 <= idle_w <= busy_w, got idle_w={idle_w}, busy_w={busy_w}"
    )
    with pytest.raises(UsageError, match=message):
        Power(idle_w=idle_w, busy_w=busy_w)


def test_a_worker_that_always_draws_the_same_is_allowed():
    assert Power(idle_w=3.0, busy_w=3.0).joules(busy_s=1.0, whole_s=2.0) == 6.0
    assert Power(idle_w=0.0, busy_w=0.0).joules(busy_s=1.0, whole_s=2.0) == 0.0
