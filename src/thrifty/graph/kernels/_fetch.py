"""Prefetching of feature rows into the cache."""

from __future__ import annotations

import numpy as np

from ._compile import inlined, prefetch


LINE = 64
"""Bytes that one fetch loads."""
_LINES_AHEAD = 64
"""Cache lines between prefetch and use; by measurement, speed is flat from 32 to 128."""
_MOST_ROWS_AHEAD = 32


@inlined
def rows_ahead(features: np.ndarray) -> int:
    """Return the number of rows between prefetch and use: many narrow ones or few wide ones."""
    lines = 1 + features.shape[1] * features.itemsize // LINE
    return max(1, min(_MOST_ROWS_AHEAD, _LINES_AHEAD // lines))


@inlined
def fetch_row(features: np.ndarray, node: int, step: int) -> None:
    """Fetch all cache lines of a row; a line has ``step`` elements."""
    # An index instead of a second array: numba counts references to each array that is passed on,
    # which costs as much as a short row.
    at = np.int64(node) * features.shape[1]
    end = at + features.shape[1]
    # A while loop, because a range would divide by the non-constant step once for each row.
    while at < end:
        prefetch(features, at)
        at += step
    # Rows seldom begin at a cache line, so their end may lie in one more.
    prefetch(features, end - 1)
