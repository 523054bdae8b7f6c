from __future__ import annotations

import os
import platform
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.graph import twin
from thrifty.graph.kernels import (
    COMPILED,
    _csr,
    choose,
    count_edges,
    free_slots,
    mix,
    num_taken,
    read_neighbors,
    wrapping,
)
from thrifty.graph.kernels._csr import GOLDEN, below, stream


pytestmark = pytest.mark.slow


words = st.integers(0, 2**64 - 1)


def test_kernels_are_compiled_unless_numba_is_told_not_to():
    assert (os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}) == COMPILED


def test_mix_is_splitmix64():
    # The first numbers of java.util.SplittableRandom(1234567), which are published as test vectors.
    states = [np.uint64(1234567 + n * int(GOLDEN) & twin.WORD) for n in (1, 2, 3)]
    with wrapping():
        numbers = [int(mix(state)) for state in states]
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(word=words)
def test_mix_is_that_of_the_twin(word):
    with wrapping():
        assert int(mix(np.uint64(word))) == twin.mix(word)


@given(key=words, row=st.integers(0, 2**31))
def test_the_state_of_a_row_is_that_of_the_twin(key, row):
    with wrapping():
        assert int(stream(np.uint64(key), row)) == twin.Draws(key, row).state


bounds = st.one_of(st.integers(1, 70_000), st.integers(1, 2**40))


@given(word=st.one_of(words, st.sampled_from([0, 2**64 - 1])), bound=bounds)
def test_a_word_below_a_bound_is_that_of_the_twin(word, bound):
    number = below(np.uint64(word), bound)
    assert 0 <= number < bound
    assert int(number) == twin.below(word, bound)


@pytest.mark.parametrize("bound", [1, 2, 3, 2**16 - 1, 2**16, 2**31 - 1, 2**40 + 1])
def test_a_word_below_a_bound_reaches_both_ends(bound):
    assert below(np.uint64(0), bound) == 0
    assert below(np.uint64(2**64 - 1), bound) == bound - 1


@pytest.mark.parametrize(
    ("degree", "fanout", "replace", "expected"),
    [
        (5, -1, False, 5),
        (5, -1, True, 5),
        (5, 3, False, 3),
        (3, 5, False, 3),
        (3, 5, True, 5),
        (0, 5, True, 0),
        (4, 0, True, 0),
        (4, 0, False, 0),
    ],
)
def test_edges_taken_of_a_row(degree, fanout, replace, expected):
    assert num_taken(degree, fanout, replace) == expected


@settings(max_examples=100 if COMPILED else 30)
@given(
    degrees=st.lists(st.integers(0, 90), min_size=1, max_size=60),
    fanout=st.sampled_from([-1, 0, 1, 10, 40, 64]),
    replace=st.booleans(),
    origin=st.integers(0, 1000),
)
def test_rows_are_counted_as_they_are_chosen(degrees, fanout, replace, origin):
    indptr = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)])
    rows = np.arange(len(degrees))[::-1].copy()
    num = int(count_edges(indptr, rows, fanout, replace))
    picks, starts = np.full(num + 3, -7), np.empty(len(rows) + 1, dtype=np.int32)
    starts[0] = origin
    with wrapping():
        assert choose(indptr, rows, fanout, replace, np.uint64(3), starts, picks) == num
    assert (picks[num:] == -7).all()
    expected = [num_taken(degrees[row], fanout, replace) for row in rows]
    assert np.diff(starts).tolist() == expected
    assert starts[-1] - origin == num
    row_of_pick = np.repeat(rows, expected)
    assert (indptr[row_of_pick] <= picks[:num]).all()
    assert (picks[:num] < indptr[row_of_pick + 1]).all()


def test_edges_beyond_32_bits_can_be_picked():
    indptr = np.array([2**40, 2**40 + 100])
    picks, starts = np.empty(80, dtype=np.int64), np.zeros(3, dtype=np.int32)
    for fanout in (40, 10):
        with wrapping():
            choose(indptr, np.zeros(2, dtype=np.int64), fanout, False, np.uint64(3), starts, picks)
        expected = [
            2**40 + p for row in (0, 1) for p in twin.floyd(fanout, 100, twin.Draws(3, row))
        ]
        assert picks[: 2 * fanout].tolist() == expected


@pytest.mark.parametrize("fanout", [10, 32, 33])
@pytest.mark.parametrize("degree", [63, 64, 65, 66, 67, 80])
def test_picks_of_many_rows_are_those_of_the_twin(degree, fanout):
    # Many rows, because only one in two hundred shows whether a mask's bits stand for one neighbour
    # or for several.
    num = 1000
    picks, starts = np.empty(num * fanout, dtype=np.int64), np.zeros(num + 1, dtype=np.int32)
    rows = np.zeros(num, dtype=np.int64)
    with wrapping():
        choose(np.array([0, degree]), rows, fanout, False, np.uint64(3), starts, picks)
    expected = [twin.floyd(fanout, degree, twin.Draws(3, row)) for row in range(num)]
    assert picks.reshape(num, fanout).tolist() == expected


@pytest.mark.parametrize("num", [0, 1, 31, 32, 33, 200])
def test_neighbors_of_picks(num):
    rng = np.random.default_rng(num)
    indices = rng.integers(0, 1000, 77).astype(np.int32)
    picks, out = rng.integers(0, 77, num), np.empty(num, dtype=np.int32)
    read_neighbors(indices, picks, out)
    assert (out == indices[picks]).all()


def test_only_the_slots_of_a_batch_are_freed():
    keys = np.arange(6, dtype=np.int32)
    free_slots(keys, np.array([4, 1]))
    assert keys.tolist() == [0, -1, 2, 3, -1, 5]


def test_unsigned_numbers_wrap_around_silently():
    with warnings.catch_warnings(), wrapping():
        warnings.simplefilter("error")
        assert int(mix(np.uint64(2**64 - 1))) == twin.mix(2**64 - 1)


@pytest.mark.skipif(not COMPILED, reason="is nothing without a compiler")
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_prefetch_is_an_instruction(dtype):
    instruction = {"x86_64": "prefetch", "AMD64": "prefetch", "aarch64": "prfm", "arm64": "prfm"}
    expected = instruction.get(platform.machine())
    if expected is None:
        pytest.skip("a processor whose instructions are not known here")

    def fetch(array, index):
        _csr.prefetch(array, index)

    compiled = _csr.numba.njit(fetch)
    compiled(np.zeros(4, dtype=dtype), 2**40)
    assert any(expected in code for code in compiled.inspect_asm().values())


def test_a_kernel_is_compiled_where_nothing_can_be_kept(monkeypatch):
    compiler = _csr.numba.njit

    def njit(*args, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiler(*args, **options)

    monkeypatch.setattr(_csr.numba, "njit", njit)
    assert _csr.kernel(lambda a: a + 1)(1) == 2
