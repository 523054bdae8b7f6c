"""The rounds of a ring all-reduce, one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf import Link, ring_s


def rounds_s(num_bytes, members, bytes_per_s, latency_s):
    """Return a ring's seconds: shares go around once to be summed and once to be distributed."""
    seconds = 0.0
    for _ in ("add up", "hand out"):
        for _ in range(members - 1):
            seconds += latency_s + num_bytes / members / bytes_per_s
    return seconds


links = st.builds(
    Link,
    bytes_per_s=st.floats(1e6, 1e11),
    latency_s=st.floats(0, 1e-3),
    inner_bytes_per_s=st.floats(1e6, 1e12),
    inner_latency_s=st.floats(0, 1e-3),
)


@given(links, st.floats(0, 1e10), st.integers(1, 12), st.integers(1, 8))
@drawn
def test_a_sum_takes_a_ring_between_machines_and_one_inside(link, num_bytes, nodes, per_node):
    between = rounds_s(num_bytes, nodes, link.bytes_per_s, link.latency_s)
    inside = rounds_s(num_bytes, per_node, link.inner_bytes_per_s, link.inner_latency_s)
    taken = link.all_reduce_s(num_bytes=num_bytes, nodes=nodes, per_node=per_node)
    assert taken == pytest.approx(between + inside, rel=1e-9)


def test_who_is_alone_sums_nothing():
    assert Link(bytes_per_s=1.0, latency_s=9.0).all_reduce_s(num_bytes=1e9, nodes=1) == 0.0


def test_rings_broadcast():
    sizes, members = np.array([[1e6], [1e9]]), np.array([1, 2, 7])
    table = ring_s(sizes, members, 1e9, 1e-4)
    for row, num_bytes in enumerate(sizes[:, 0]):
        for column, n in enumerate(members):
            assert table[row, column] == pytest.approx(rounds_s(num_bytes, n, 1e9, 1e-4))


@pytest.mark.parametrize("name", ["bytes_per_s", "inner_bytes_per_s"])
@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan])
def test_links_that_carry_nothing(name, speed):
    with pytest.raises(UsageError, match="a link carries something"):
        Link(**{name: speed})


@pytest.mark.parametrize("name", ["latency_s", "inner_latency_s"])
@pytest.mark.parametrize("latency", [-1e-9, math.nan])
def test_latencies_that_make_no_sense(name, latency):
    with pytest.raises(UsageError, match="a latency is not negative"):
        Link(**{name: latency})
