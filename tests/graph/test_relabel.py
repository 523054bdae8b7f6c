from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thrifty.graph import _sampler
from thrifty.graph._sampler import DenseRelabeler, HashRelabeler
from thrifty.graph.kernels import COMPILED, relabel_hashed, wrapping
from thrifty.graph.kernels._neighbours import _home


pytestmark = pytest.mark.slow


NUM_NODES = 60
EXAMPLES = 200 if COMPILED else 60
found = st.lists(st.integers(0, NUM_NODES - 1), max_size=40)
batches = st.lists(st.lists(found, max_size=4), max_size=5)


class Numbering:
    """A relabeler with its nodes, and a dict that must agree with it."""

    def __init__(self, relabeler):
        self.relabeler = relabeler
        self.start()

    def start(self):
        self.relabeler.start()
        self.nodes = np.empty(0, dtype=np.int64)
        self.known = {}

    def check(self, found):
        found = np.array(found, dtype=np.int32)
        num_nodes = len(self.known)
        nodes = np.concatenate([self.nodes[:num_nodes], np.empty(len(found), dtype=np.int64)])
        out = np.empty(len(found), dtype=np.int32)
        with wrapping():
            num = self.relabeler.number(found, nodes, num_nodes=num_nodes, out=out)
        assert out.tolist() == [self.known.setdefault(n, len(self.known)) for n in found.tolist()]
        assert nodes[:num].tolist() == list(self.known)
        self.nodes = nodes


def check_all(relabeler, batches):
    numbering = Numbering(relabeler)
    for batch in batches:
        numbering.start()
        for found in batch:
            numbering.check(found)


@settings(max_examples=EXAMPLES)
@given(batches=batches)
def test_numbers_by_a_dense_table_are_those_of_a_dict(batches):
    check_all(DenseRelabeler(NUM_NODES), batches)


@settings(max_examples=EXAMPLES)
@given(batches=batches, slots=st.sampled_from([4, 8, 64]))
def test_numbers_by_a_hash_table_that_grows_are_those_of_a_dict(batches, slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sampler, "_FEWEST_SLOTS", slots)
        check_all(HashRelabeler(), batches)


@pytest.mark.parametrize("bits", [30, 31])
def test_stamps_that_begin_again(bits):
    relabeler = DenseRelabeler(NUM_NODES)
    # The stamp gets the bits of 32 that local numbers leave: it counts 1 to 3, or stays at 1.
    relabeler._bits = bits
    rng = np.random.default_rng(0)
    check_all(relabeler, rng.integers(0, NUM_NODES, (10, 2, 30)).tolist())


def test_the_last_stamp_before_stamps_begin_again():
    relabeler = DenseRelabeler(NUM_NODES)
    numbering = Numbering(relabeler)
    numbering.check([1, 2, 3])
    relabeler._stamp = (1 << (32 - relabeler._bits)) - 2
    for found in ([5, 4], [3, 2, 1], [1, 5, 3]):
        numbering.start()
        numbering.check(found)
    assert relabeler._stamp == 2


@pytest.mark.parametrize(("num_nodes", "bits"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_local_numbers_have_the_bits_they_need(num_nodes, bits):
    relabeler = DenseRelabeler(num_nodes)
    assert relabeler._bits == bits
    check_all(relabeler, [[list(range(num_nodes))] * 2] * 5)


def test_a_hash_table_grows_in_the_middle_of_a_batch(monkeypatch):
    monkeypatch.setattr(_sampler, "_FEWEST_SLOTS", 4)
    numbering = Numbering(HashRelabeler())
    numbering.check([900])
    numbering.check(range(500, 1500))
    numbering.check([900, 499, 500])
    assert len(numbering.relabeler._keys) == 8192


def test_a_hash_table_does_not_grow_for_nodes_it_has(monkeypatch):
    monkeypatch.setattr(_sampler, "_FEWEST_SLOTS", 64)
    numbering = Numbering(HashRelabeler())
    numbering.check([3, 1, 2] * 500)
    assert len(numbering.relabeler._keys) == 64


@pytest.mark.parametrize("num", [1, 3000, 8192, 9000])
def test_a_hash_table_is_never_more_than_a_quarter_full(num):
    relabeler = HashRelabeler()
    Numbering(relabeler).check(range(num))
    assert (relabeler._keys >= 0).sum() == num <= len(relabeler._keys) / 4


def test_nothing_is_left_in_a_hash_table_by_the_batch_before():
    relabeler = HashRelabeler()
    Numbering(relabeler).check(range(50))
    relabeler.start()
    assert (relabeler._keys == -1).all()


def nodes_at(home, *, last, num):
    return [node for node in range(100_000) if _home(np.int32(node), last) == home][:num]


def test_nodes_with_one_home_and_the_end_of_the_table():
    last = 63
    with wrapping():
        crowded = [*nodes_at(last, last=last, num=5), *nodes_at(0, last=last, num=3)]
    numbering = Numbering(HashRelabeler())
    numbering.relabeler._make(last + 1)
    assert 4 * len(crowded) <= last + 1
    numbering.check(crowded)
    numbering.check(crowded[::-1])
    assert len(numbering.relabeler._keys) == last + 1


class Failing(HashRelabeler):
    """A relabeler that fails in the middle of a batch, when some slots are already taken."""

    def number(self, found, nodes, *, num_nodes, out):
        super().number(found, nodes, num_nodes=num_nodes, out=out)
        raise MemoryError


def test_a_hash_table_after_an_exception():
    relabeler = Failing()
    with pytest.raises(MemoryError):
        Numbering(relabeler).check([1, 2, 3])
    relabeler.__class__ = HashRelabeler
    check_all(relabeler, [[[3, 9, 1]]])


def test_seeds_may_be_int64():
    out, nodes = np.empty(3, dtype=np.int64), np.empty(3, dtype=np.int64)
    for relabeler in (DenseRelabeler(10), HashRelabeler()):
        relabeler.start()
        with wrapping():
            assert relabeler.number(np.array([9, 4, 9]), nodes, num_nodes=0, out=out) == 2
        assert out.tolist() == [0, 1, 0]


def test_largest_node_number():
    keys, values = np.full(8, -1, dtype=np.int32), np.empty(8, dtype=np.int32)
    slots, nodes = np.empty(8, dtype=np.int64), np.empty(8, dtype=np.int64)
    found = np.array([2**31 - 2, 0, 2**31 - 2], dtype=np.int32)
    out = np.empty(3, dtype=np.int32)
    with wrapping():
        assert relabel_hashed(found, keys, values, slots, nodes, 0, out) == 2
    assert (out.tolist(), nodes[:2].tolist()) == ([0, 1, 0], [2**31 - 2, 0])
