"""Sums of rows over neighbours, and the way back through the transposed rows."""

from __future__ import annotations

import numpy as np

from ._compile import inlined, kernel, prefetch


AHEAD = 6
"""Rows of features between fetching and use."""
_LINE = 64
"""Bytes that one fetch brings."""


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
    """Writes sums or means of rows of ``x`` to the rows ``begin`` to ``end`` of ``out``.

    Where ``out`` is twice as wide as ``x``, its right half gets the row of ``x`` with the same number.
    """
    width = x.shape[1]
    step = _LINE // x.itemsize
    for i in range(begin, end):
        low, high = indptr[i], indptr[i + 1]
        row = out[i]
        row[:width] = 0
        e = low
        # two rows at a time: half as many passes over the sum
        while e + 1 < high:
            _fetch(x, indices, e + AHEAD, step)
            _fetch(x, indices, e + AHEAD + 1, step)
            first, second = x[indices[e]], x[indices[e + 1]]
            for f in range(width):
                row[f] += first[f] + second[f]
            e += 2
        if e < high:
            _fetch(x, indices, e + AHEAD, step)
            last = x[indices[e]]
            for f in range(width):
                row[f] += last[f]
        if mean and high - low > 1:
            count = x.dtype.type(high - low)
            for f in range(width):
                row[f] /= count
        if len(row) > width:
            row[width:] = x[i]


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
    """The transposed of ``gather``: ``indptr`` and ``indices`` say to which destinations each source sent its row.

    ``weights`` has a factor for each destination, or no entry at all: then it is 1.
    """
    width = out.shape[1]
    step = _LINE // grad.itemsize
    for j in range(begin, end):
        row = out[j]
        if grad.shape[1] > width and j < grad.shape[0]:
            row[:] = grad[j, width:]
        else:
            row[:] = 0
        for e in range(indptr[j], indptr[j + 1]):
            _fetch(grad, indices, e + AHEAD, step)
            i = indices[e]
            sent = grad[i]
            if len(weights) > 0:
                weight = weights[i]
                for f in range(width):
                    row[f] += weight * sent[f]
            else:
                for f in range(width):
                    row[f] += sent[f]


@inlined
def _fetch(x: np.ndarray, indices: np.ndarray, e: int, step: int) -> None:
    """Fetches the row of ``x`` that edge ``e`` will read, if there is such an edge."""
    if e < len(indices):
        at = np.int64(indices[e]) * x.shape[1]
        for f in range(0, x.shape[1], step):
            prefetch(x, at + f)
