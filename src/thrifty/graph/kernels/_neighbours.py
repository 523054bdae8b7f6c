"""Numba kernels of graph layers: sums over neighbours, attention, ReLU with dropout."""

from __future__ import annotations

import math

import numpy as np

from ._csr import GOLDEN, LINE, fetch_row, kernel, mix


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


_32 = np.uint64(32)
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
        x: flat; may be ``out``.
        key: key of the draws; element ``i`` uses half of word ``i // 2``.
        dropped: how many of ``2**32`` draws set an element to zero.
        scale: factor of the kept elements.
        out: flat.
        begin: first element.
        end: one after the last element.
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
