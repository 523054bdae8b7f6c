"""Numba kernels on neighbours: choosing and relabelling them, and the layers that use them.

Layers are sums over neighbours, attention, and ReLU with dropout.
"""

from __future__ import annotations

import math

import numpy as np

from ._csr import GOLDEN, LINE, below, fetch_row, inlined, kernel, mix, prefetch, stream


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


AHEAD = 8
"""Rows of features between prefetch and use; by measurement, speed is flat from 4 to 16."""


@kernel
def gather(
    indptr: np.ndarray,
    indices: np.ndarray,
    x: np.ndarray,
    mean: bool,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write sums or means of rows of ``x`` to the rows ``begin`` to ``end`` of ``out``.

    If ``out`` is twice as wide as ``x``, its right half gets the row of ``x`` with the same number.
    """
    width, step = x.shape[1], LINE // x.itemsize
    last = len(indices) - AHEAD - 1
    for i in range(begin, end):
        low, high = np.int64(indptr[i]), np.int64(indptr[i + 1])
        for f in range(width):
            out[i, f] = 0
        e = low
        # Two rows at a time take half as many passes over the sum.
        while e + 1 < high:
            if e < last:
                fetch_row(x, indices[np.uint64(e + AHEAD)], step)
                fetch_row(x, indices[np.uint64(e + AHEAD + 1)], step)
            first = np.uint64(indices[np.uint64(e)])
            second = np.uint64(indices[np.uint64(e + 1)])
            for f in range(width):
                out[i, f] += x[first, f] + x[second, f]
            e += 2
        if e < high:
            if e < last:
                fetch_row(x, indices[np.uint64(e + AHEAD)], step)
            first = np.uint64(indices[np.uint64(e)])
            for f in range(width):
                out[i, f] += x[first, f]
        if mean and high - low > 1:
            count = x.dtype.type(high - low)
            for f in range(width):
                out[i, f] /= count
        if out.shape[1] > width:
            for f in range(width):
                out[i, width + f] = x[i, f]


@kernel
def gather_back(
    indptr: np.ndarray,
    indices: np.ndarray,
    grad: np.ndarray,
    weights: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Apply the transpose of ``gather``.

    ``indptr`` and ``indices`` say to which destinations each source sent its row. ``weights`` has
    a factor for each destination; if it is empty, all factors are 1.
    """
    width, step = out.shape[1], LINE // grad.itemsize
    num_own = grad.shape[0] if grad.shape[1] > width else 0
    last = len(indices) - AHEAD
    for j in range(begin, end):
        if j < num_own:
            for f in range(width):
                out[j, f] = grad[j, width + f]
        else:
            for f in range(width):
                out[j, f] = 0
        for e in range(np.int64(indptr[j]), np.int64(indptr[j + 1])):
            if e < last:
                fetch_row(grad, indices[np.uint64(e + AHEAD)], step)
            i = np.uint64(indices[np.uint64(e)])
            if len(weights) > 0:
                weight = weights[i]
                for f in range(width):
                    out[j, f] += weight * grad[i, f]
            else:
                for f in range(width):
                    out[j, f] += grad[i, f]


@kernel
def edge_softmax(
    indptr: np.ndarray,
    indices: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    slope: float,
    alpha: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write each row's softmax over its edges to ``alpha[e, h]``.

    The scores are ``leaky_relu(source[j, h] + destination[i, h])``.
    """
    for i in range(begin, end):
        low, high = indptr[i], indptr[i + 1]
        for h in range(alpha.shape[1]):
            largest = -np.inf
            for e in range(low, high):
                score = source[indices[e], h] + destination[i, h]
                if score < 0:
                    score *= slope
                alpha[e, h] = score
                # A NaN score is never the largest, but makes the whole row NaN through the sum.
                largest = max(largest, score)
            total = 0.0
            for e in range(low, high):
                power = math.exp(alpha[e, h] - largest)
                alpha[e, h] = power
                total += power
            for e in range(low, high):
                alpha[e, h] /= total


@kernel
def edge_softmax_back(
    indptr: np.ndarray,
    indices: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    slope: float,
    alpha: np.ndarray,
    grad: np.ndarray,
    grad_scores: np.ndarray,
    grad_destination: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write the gradients of all edges' scores and of ``destination``, given that of ``alpha``."""
    for i in range(begin, end):
        low, high = indptr[i], indptr[i + 1]
        for h in range(alpha.shape[1]):
            inner = 0.0
            for e in range(low, high):
                inner += alpha[e, h] * grad[e, h]
            total = 0.0
            for e in range(low, high):
                score = alpha[e, h] * (grad[e, h] - inner)
                # At 0, PyTorch uses the slope as well.
                if source[indices[e], h] + destination[i, h] <= 0:
                    score *= slope
                grad_scores[e, h] = score
                total += score
            grad_destination[i, h] = total


@kernel
def weighted_sum(
    indptr: np.ndarray,
    indices: np.ndarray,
    edges: np.ndarray,
    weights: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write ``out[i] = sum over its edges e of weights[edges[e], head] * x[indices[e]]``.

    If ``edges`` is empty, the weights are ``weights[e, head]``.
    """
    heads = weights.shape[1]
    width = x.shape[1] // heads
    for i in range(begin, end):
        for f in range(x.shape[1]):
            out[i, f] = 0
        for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
            source = np.uint64(indices[np.uint64(e)])
            edge = np.uint64(edges[np.uint64(e)] if len(edges) > 0 else e)
            for h in range(heads):
                weight = weights[edge, h]
                for f in range(h * width, (h + 1) * width):
                    out[i, f] += weight * x[source, f]


@kernel
def edge_products(
    indptr: np.ndarray,
    indices: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write inner products of the destination's part of ``rows`` and the source's part of ``x``.

    The product of edge ``e`` and a head goes to ``out[e, head]``.
    """
    heads = out.shape[1]
    width = x.shape[1] // heads
    for i in range(begin, end):
        for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
            source = np.uint64(indices[np.uint64(e)])
            for h in range(heads):
                total = x.dtype.type(0)
                for f in range(h * width, (h + 1) * width):
                    total += rows[i, f] * x[source, f]
                out[e, h] = total


_LOW = np.uint64(0xFFFFFFFF)


@kernel
def relu_dropout(
    x: np.ndarray,
    key: np.uint64,
    dropped: np.uint64,
    scale: float,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write the elements from ``begin`` to ``end``, each even or the end of the array.

    NaN stays NaN unless it is dropped.

    Args:
        x: Flat; may be ``out``.
        key: Key of the draws; element ``i`` uses half of word ``i // 2``.
        dropped: How many of ``2**32`` draws set an element to zero.
        scale: Factor of the kept elements.
        out: Flat.
        begin: First element.
        end: One after the last element.
    """
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    for n in range(begin // 2, end // 2):
        word = mix(key + np.uint64(n) * GOLDEN)
        i = 2 * n
        first, second = x[i] * factor, x[i + 1] * factor
        out[i] = zero if (first <= 0) | (word & _LOW < dropped) else first
        out[i + 1] = zero if (second <= 0) | (word >> _32 < dropped) else second
    if end % 2 == 1:
        word = mix(key + np.uint64(end // 2) * GOLDEN)
        last = x[end - 1] * factor
        out[end - 1] = zero if (last <= 0) | (word & _LOW < dropped) else last


@kernel
def relu_dropout_back(
    y: np.ndarray, grad: np.ndarray, scale: float, out: np.ndarray, begin: int, end: int
) -> None:
    """Write the gradient of the input, given the output ``y`` and its gradient.

    The gradient passes where an element was kept.
    """
    factor, zero = grad.dtype.type(scale), grad.dtype.type(0)
    for i in range(begin, end):
        # Read before knowing whether it is needed: a choice between two numbers needs no branch.
        passed = grad[i] * factor
        out[i] = zero if y[i] <= 0 else passed
