"""Numba kernels that choose, relabel and weigh sampled neighbours."""

from __future__ import annotations

import numpy as np

from ._csr import GOLDEN, below, inlined, kernel, mix, prefetch, stream


_CHOOSE_AHEAD = 16
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
        if i + _CHOOSE_AHEAD < len(rows):
            prefetch(indptr, rows[i + _CHOOSE_AHEAD])
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
        if i + _CHOOSE_AHEAD < len(rows):
            prefetch(indptr, rows[np.uint64(i + _CHOOSE_AHEAD)])
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
def _floyd(picks: np.ndarray, at: int, num: int, low: int, degree: int, state: np.uint64) -> None:
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


_RELABEL_AHEAD = 24
"""Edges between prefetch and use."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


@kernel
def relabel_dense(
    found: np.ndarray,
    table: np.ndarray,
    stamp: int,
    bits: int,
    nodes: np.ndarray,
    num_nodes: int,
    out: np.ndarray,
) -> int:
    """Write local numbers, using a table with an entry for each node of the graph.

    An entry is ``stamp << bits | local number``; entries with another stamp are from earlier
    batches.

    Returns:
        The number of nodes in the batch afterwards.
    """
    num = len(found)
    mark = np.uint32(stamp << bits)
    mask = np.uint32((1 << bits) - 1)
    for e in range(num):
        if e + _RELABEL_AHEAD < num:
            prefetch(table, found[np.uint64(e + _RELABEL_AHEAD)])
        node = np.uint32(found[e])
        entry = table[node]
        if entry & ~mask == mark:
            out[e] = entry & mask
        else:
            table[node] = mark | np.uint32(num_nodes)
            nodes[np.uint64(num_nodes)] = node
            out[e] = num_nodes
            num_nodes += 1
    return num_nodes


@kernel
def relabel_hashed(
    found: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    slots: np.ndarray,
    nodes: np.ndarray,
    num_nodes: int,
    out: np.ndarray,
) -> int:
    """Write local numbers, using a hash table with open addressing.

    ``keys`` (-1: free) and ``values`` have a power of two of slots, more than there are nodes.
    ``slots`` records the slot of each node of the batch, so that it can be freed again.

    Returns:
        The number of nodes in the batch afterwards.
    """
    num = len(found)
    last = len(keys) - 1
    for e in range(num):
        if e + _RELABEL_AHEAD < num:
            prefetch(keys, _home(found[e + _RELABEL_AHEAD], last))
        node = found[e]
        slot = _home(node, last)
        while keys[slot] != node and keys[slot] != -1:
            slot = (slot + 1) & last
        if keys[slot] == -1:
            keys[slot] = node
            values[slot] = num_nodes
            slots[num_nodes] = slot
            nodes[num_nodes] = node
            num_nodes += 1
        out[e] = values[slot]
    return num_nodes


@kernel
def free_slots(keys: np.ndarray, slots: np.ndarray) -> None:
    """Free the slots of a batch."""
    for i in range(len(slots)):
        keys[slots[i]] = -1


@inlined
def _home(node: int, last: int) -> np.int64:
    """Return the first slot to look at."""
    return np.int64((np.uint64(node) * _MULTIPLIER) >> _32) & last


_INCLUSION_AHEAD = 32
"""Edges between prefetch and use."""


@kernel
def push(indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> None:
    """Add the weight of each node to the sum of each of its neighbours, once for each edge."""
    num = len(indices)
    for node in range(len(weights)):
        weight = weights[node]
        # Most nodes are out of reach in early hops.
        if weight == 0.0:
            continue
        for e in range(indptr[node], indptr[node + 1]):
            if e + _INCLUSION_AHEAD < num:
                prefetch(sums, indices[e + _INCLUSION_AHEAD])
            sums[indices[e]] += weight
