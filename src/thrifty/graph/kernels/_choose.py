"""First pass of a hop: choose the edges to take of each row."""

from __future__ import annotations

import numpy as np

from ._compile import inlined, kernel, prefetch
from ._random import GOLDEN, below, mix, stream


AHEAD = 16
"""Rows between prefetch and use; by measurement, speed is flat from 8 to 32."""
_MASK_BITS = 64
_SCANNED = 32
"""Picks of a row up to which a scan is faster than a set; speed is flat from 24 to 40."""
_ONE, _LAST_BIT = np.uint64(1), np.uint64(63)


@kernel
def count_edges(indptr: np.ndarray, rows: np.ndarray, fanout: int, replace: bool) -> int:
    """Return how many edges a hop takes; ``fanout`` -1 takes all of them."""
    total = 0
    for i in range(len(rows)):
        if i + AHEAD < len(rows):
            prefetch(indptr, rows[i + AHEAD])
        degree = indptr[rows[i] + 1] - indptr[rows[i]]
        total += num_taken(degree, fanout, replace)
    return total


@kernel
def choose(
    indptr: np.ndarray,
    rows: np.ndarray,
    fanout: int,
    replace: bool,
    key: np.uint64,
    starts: np.ndarray,
    picks: np.ndarray,
) -> int:
    """Write the chosen edges to ``picks``, row by row, and the ends of the rows to ``starts[1:]``.

    ``starts[0]`` says where the first row begins. ``picks`` has room for all chosen edges and
    begins with those of the first row.

    Returns:
        The number of chosen edges.
    """
    origin = starts[0]
    at = 0
    for i in range(len(rows)):
        if i + AHEAD < len(rows):
            prefetch(indptr, rows[np.uint64(i + AHEAD)])
        low = indptr[np.uint64(rows[i])]
        degree = indptr[np.uint64(rows[i] + 1)] - low
        num = num_taken(degree, fanout, replace)
        state = stream(key, i)
        if replace and fanout >= 0:
            for n in range(num):
                state += GOLDEN
                picks[np.uint64(at + n)] = low + below(mix(state), degree)
        elif num == degree:
            for n in range(num):
                picks[np.uint64(at + n)] = low + n
        elif num <= _SCANNED or degree <= _MASK_BITS:
            _floyd(picks, at, num, low, degree, state)
        else:
            _floyd_of_many(picks, at, num, low, degree, state)
        at += num
        starts[i + 1] = origin + at
    return at


@inlined
def num_taken(degree: int, fanout: int, replace: bool) -> int:
    """Return how many edges of a row are taken."""
    if fanout < 0 or degree == 0:
        return degree
    if replace:
        return fanout
    return min(degree, fanout)


@inlined
def _floyd(
    picks: np.ndarray, at: int, num: int, low: int, degree: int, state: np.uint64
) -> None:
    """Pick ``num`` different numbers below ``degree``, each set with the same probability.

    Algorithm by Robert Floyd in Bentley, "Programming Pearls: A Sample of Brilliance", CACM 1987.
    Each pick sets its bit. Up to degree 64 the bit is the answer; beyond that, it rules out nearly
    all scans.
    """
    seen = np.uint64(0)
    for n in range(num):
        last = degree - num + n
        state += GOLDEN
        pick = below(mix(state), last + 1)
        bit = _ONE << (np.uint64(pick) & _LAST_BIT)
        if seen & bit != 0:
            taken = degree <= _MASK_BITS
            if not taken:
                for m in range(at, at + n):
                    if picks[np.uint64(m)] == low + pick:
                        taken = True
                        break
            if taken:
                pick = last
                bit = _ONE << (np.uint64(pick) & _LAST_BIT)
        seen |= bit
        picks[np.uint64(at + n)] = low + pick


@kernel
def _floyd_of_many(
    picks: np.ndarray, at: int, num: int, low: int, degree: int, state: np.uint64
) -> None:
    """Make the same picks with a hash set of earlier picks.

    The time grows with ``num``, while that of scans grows with its square.
    """
    size = 2
    while size < 2 * num:
        size *= 2
    taken = np.full(size, -1, dtype=np.int64)
    for n in range(num):
        last = degree - num + n
        state += GOLDEN
        pick = below(mix(state), last + 1)
        slot = pick & (size - 1)
        while taken[slot] != -1 and taken[slot] != pick:
            slot = (slot + 1) & (size - 1)
        if taken[slot] == pick:
            pick = last
            slot = pick & (size - 1)
            while taken[slot] != -1:
                slot = (slot + 1) & (size - 1)
        taken[slot] = pick
        picks[np.uint64(at + n)] = low + pick
