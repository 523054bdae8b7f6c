"""Sums over workers are timed, and all workers get the same timings."""

from __future__ import annotations

import pytest

from tests.hetero.memberships import ThreadCluster
from thrifty.core import HeteroError
from thrifty.hetero import FixedMembership
from thrifty.hetero.workers._membership import measure_all_reduce
from thrifty.perf import Link
from thrifty.testing import VirtualClock


LINK = Link(bytes_per_s=1e6, latency_s=0.01)
SIZES = [4, 4000, 40_002]


class Wire:
    """A membership whose sums take a link's time, with delays at first and once in the middle."""

    def __init__(self, members, clock, factor=1.0, late=(0, 1, 5)):
        self._members, self._clock, self._factor, self._late = members, clock, factor, late
        self.num_bytes = []

    def agree(self, **options):
        view = self._members.agree(**options)
        self._num = len(view.names)
        return view

    def all_reduce(self, tensor):
        self._members.all_reduce(tensor)
        late = self.num_bytes.count(tensor.nbytes) in self._late
        self.num_bytes.append(tensor.nbytes)
        took = LINK.all_reduce_s(num_bytes=tensor.nbytes, nodes=self._num)
        self._clock.advance(self._factor * took + (1.0 if late else 0.0))


def measured(factors, **options):
    """Return the timings that each worker gets, and the sums that it took part in."""
    wires = {}

    def job(name):
        def run(members):
            clock = VirtualClock()
            wires[name] = Wire(members, clock, factors[name])
            return measure_all_reduce(wires[name], SIZES, name="vm", clock=clock, **options)

        return run

    heard = ThreadCluster().run({name: job(name) for name in factors})
    return heard, wires


def test_sizes_are_timed_without_what_is_out_of_the_ordinary():
    heard, wires = measured({"a": 1.0, "b": 1.0, "c": 1.0})
    assert heard["a"] == heard["b"] == heard["c"]
    for timing, size in zip(heard["a"], (4, 4000, 40_000), strict=True):
        assert (timing.name, timing.num_bytes, timing.shape) == ("vm", size, (3, 1))
        assert timing.collective == "all_reduce"
        assert timing.seconds == pytest.approx(LINK.all_reduce_s(num_bytes=size, nodes=3))
    # 12 sums of each size, and one to exchange the times.
    assert len(wires["a"].num_bytes) == 12 * len(SIZES) + 1


def test_the_first_sums_warm_up():
    heard, wires = measured({"a": 1.0, "b": 1.0}, repeats=1)
    assert wires["a"].num_bytes.count(4) == 3
    assert heard["a"][0].seconds == pytest.approx(LINK.all_reduce_s(num_bytes=4, nodes=2))


def test_all_hear_the_mean_over_the_workers():
    heard, _ = measured({"a": 1.0, "b": 3.0})
    assert heard["a"] == heard["b"]
    assert heard["a"][1].seconds == pytest.approx(2 * LINK.all_reduce_s(num_bytes=4000, nodes=2))


def test_workers_of_one_machine_count_as_devices_of_it():
    heard, _ = measured(dict.fromkeys("abcd", 1.0), per_node=2, repeats=3)
    assert {timing.shape for timing in heard["a"]} == {(2, 2)}


def test_one_worker_has_nothing_to_measure():
    assert measure_all_reduce(FixedMembership(), SIZES, name="vm") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "each size is summed at least once"),
        ({"sizes": [3]}, "has 4 bytes or more"),
        ({"per_node": 0}, "1 workers cannot be 0 on each machine"),
        ({"per_node": 2}, "1 workers cannot be 2 on each machine"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(HeteroError, match=message):
        measure_all_reduce(FixedMembership(), **{"sizes": SIZES, "name": "vm", **options})
