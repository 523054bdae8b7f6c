"""Replayed iterations against an event-by-event simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf import iteration_s


pytestmark = pytest.mark.slow


def simulated_s(workers, ready, sums, *, input_s=0.0):
    """Simulate one fleet event by event; workers are (forward, backward, optimizer) seconds."""
    comm_free = 0.0
    for share, took in zip(ready, sums, strict=True):
        reached = max(forward + share * backward for forward, backward, _ in workers)
        comm_free = max(comm_free, reached) + took
    computed = max(forward + backward for forward, backward, _ in workers)
    stepped = max(comm_free, computed) + max(optimizer for *_, optimizer in workers)
    return max(stepped, input_s)


# Multiples of a quarter have exact sums in any order.
quarters = st.integers(0, 40).map(lambda n: n / 4)
shares = st.integers(0, 4).map(lambda n: n / 4)
buckets = st.lists(st.tuples(shares, quarters), min_size=1, max_size=5).map(
    lambda some: tuple(zip(*sorted(some, key=lambda bucket: bucket[0]), strict=True))
)
fleets = st.lists(st.tuples(quarters, quarters, quarters), min_size=1, max_size=3)


def replayed_s(workers, ready, sums, **options):
    forward, backward, optimizer = zip(*workers, strict=True)
    return float(
        iteration_s(
            forward_s=forward,
            backward_s=backward,
            optimizer_s=optimizer,
            bucket_ready=ready,
            bucket_s=sums,
            **options,
        )
    )


@given(fleets, buckets, quarters)
@drawn
def test_it_is_what_the_events_come_to(workers, some, input_s):
    ready, sums = some
    assert replayed_s(workers, ready, sums, input_s=input_s) == simulated_s(
        workers, ready, sums, input_s=input_s
    )


@given(fleets, buckets)
@drawn
def test_sums_hide_behind_the_backward_pass_or_add_to_it(workers, some):
    ready, sums = some
    alone = replayed_s(workers, ready, [0.0] * len(sums))
    assert alone <= replayed_s(workers, ready, sums) <= alone + sum(sums)


@given(fleets, buckets)
@drawn
def test_what_sums_steal_makes_it_longer_by_no_more_than_they_take(workers, some):
    ready, sums = some
    free, stolen = (replayed_s(workers, ready, sums, stolen=share) for share in (0.0, 1.0))
    assert free <= stolen <= free + sum(sums)


def test_a_sum_on_the_computing_cores_delays_what_follows():
    # 1 s forward; half of 2 s backward; 0.5 s of a sum, all of it stolen from computing; the other
    # half; 0.25 s of the last sum.
    taken = replayed_s([(1.0, 2.0, 0.0)], [0.5, 1.0], [0.5, 0.25], stolen=1.0)
    assert taken == 1.0 + 1.0 + 0.5 + 1.0 + 0.25
    # No computation is left that the last sum could delay.
    assert replayed_s([(1.0, 2.0, 0.0)], [1.0], [0.25], stolen=1.0) == 3.25


def test_the_slowest_reader_sets_the_pace():
    equal = {"ready": [1.0], "sums": [0.0]}
    assert replayed_s([(1.0, 1.0, 0.0)] * 2, **equal, input_s=[3.0, 7.0]) == 7.0


@given(st.lists(st.tuples(fleets.filter(lambda some: len(some) == 2), quarters), min_size=1))
@drawn
def test_one_call_answers_for_many_fleets(cases):
    workers = np.array([fleet for fleet, _ in cases])
    sums = np.array([[took, 2 * took] for _, took in cases])
    together = iteration_s(
        forward_s=workers[..., 0],
        backward_s=workers[..., 1],
        optimizer_s=workers[..., 2],
        bucket_ready=[0.25, 1.0],
        bucket_s=sums,
    )
    one_by_one = [simulated_s(fleet, [0.25, 1.0], [took, 2 * took]) for fleet, took in cases]
    assert together.tolist() == one_by_one


@pytest.mark.parametrize("sums", [[], [1.0], [1.0, 1.0, 1.0]])
def test_each_bucket_has_a_sum(sums):
    with pytest.raises(UsageError, match=f"each of 2 buckets has a sum, not {len(sums)}"):
        replayed_s([(1.0, 1.0, 0.0)], [0.5, 1.0], sums)
