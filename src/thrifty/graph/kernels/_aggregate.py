"""Sums of rows over neighbours, and their backward pass through the transposed rows.

Elements are read by two indices, never from a slice, because numba counts references to each slice.
Indices that come from memory are made unsigned. Otherwise numba would check each of them for being
negative, which would count from the end.
"""

from __future__ import annotations

import numpy as np

from ._compile import kernel
from ._fetch import LINE, fetch_row


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
