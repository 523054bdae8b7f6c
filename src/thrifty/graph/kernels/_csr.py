"""Compressed rows from edges, by counting sorts.

The sorts are linear in edges and nodes, and keep the order of edges.
"""

from __future__ import annotations

import numpy as np

from ._compile import inlined, kernel, prefetch


AHEAD = 32
"""Edges between prefetch and use."""
KEEP, REMOVE, ADD = 0, 1, 2
"""What to do with edges from a node to itself."""


@kernel
def group(keys: np.ndarray, values: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Write ``values`` to ``out``, grouped by key, and the start of each key to ``starts``.

    ``starts`` are zeros, one more than there are keys. Values of one key stay in the order of their
    appearance.
    """
    _count(keys, starts)
    num = len(keys)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(starts, keys[e + AHEAD])
        at = starts[keys[e]]
        out[at] = values[e]
        starts[keys[e]] = at + 1
    _step_back(starts)


@kernel
def reverse(
    indptr: np.ndarray, indices: np.ndarray, starts: np.ndarray, out: np.ndarray
) -> None:
    """Write the rows of the reversed edges, each in ascending order.

    ``starts`` are zeros, one more than there are nodes.
    """
    _count(indices, starts)
    num = len(indices)
    for row in range(len(indptr) - 1):
        for e in range(indptr[row], indptr[row + 1]):
            if e + AHEAD < num:
                prefetch(starts, indices[e + AHEAD])
            at = starts[indices[e]]
            out[at] = row
            starts[indices[e]] = at + 1
    _step_back(starts)


@kernel
def transpose(
    indptr: np.ndarray,
    indices: np.ndarray,
    starts: np.ndarray,
    rows: np.ndarray,
    edges: np.ndarray,
) -> None:
    """Write the reversed edges as ``reverse`` does, and each edge's number to ``edges``."""
    _count(indices, starts)
    num = len(indices)
    for row in range(len(indptr) - 1):
        for e in range(indptr[row], indptr[row + 1]):
            if e + AHEAD < num:
                prefetch(starts, indices[e + AHEAD])
            at = starts[indices[e]]
            rows[at] = row
            edges[at] = e
            starts[indices[e]] = at + 1
    _step_back(starts)


@kernel
def unite_rows(
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    loops: int,
    starts: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the union of two sets of ascending rows, without duplicates.

    Args:
        first: ``(indptr, indices)`` of the first set.
        second: ``(indptr, indices)`` of the second set.
        loops: ``KEEP``, ``REMOVE`` or ``ADD``.
        starts: receives where rows begin; entry 0 is 0.
        out: receives the union; if it is empty, entries are only counted.
    """
    at = 0
    for row in range(len(starts) - 1):
        at = _unite_row(first, second, row, loops, at, out)
        starts[row + 1] = at


@inlined
def _unite_row(
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    row: int,
    loops: int,
    at: int,
    out: np.ndarray,
) -> int:
    """Write one row from ``at`` on, and return where it ends."""
    i, i_end = first[0][row], first[0][row + 1]
    j, j_end = second[0][row], second[0][row + 1]
    loop_is_due = loops == ADD
    last = -1
    while i < i_end or j < j_end or loop_is_due:
        from_first = i < i_end and (j >= j_end or first[1][i] <= second[1][j])
        if from_first:
            node = np.int64(first[1][i])
        elif j < j_end:
            node = np.int64(second[1][j])
        else:
            node = row
        if loop_is_due and row <= node:
            node = row
            loop_is_due = False
        elif from_first:
            i += 1
        else:
            j += 1
        if node != last and not (node == row and loops == REMOVE):
            if len(out):
                out[at] = node
            at += 1
        last = node
    return at


@inlined
def _count(keys: np.ndarray, starts: np.ndarray) -> None:
    """Write where each key begins to ``starts``, which are zeros before."""
    num = len(keys)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(starts, keys[e + AHEAD])
        starts[keys[e]] += 1
    total = 0
    for key in range(len(starts)):
        count = starts[key]
        starts[key] = total
        total += count


@inlined
def _step_back(starts: np.ndarray) -> None:
    """Undo the move of each start to where the next key begins."""
    for key in range(len(starts) - 1, 0, -1):
        starts[key] = starts[key - 1]
    starts[0] = 0
