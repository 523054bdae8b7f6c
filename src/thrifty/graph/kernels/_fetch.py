"""Rows of features on their way to the cache before they are read."""

from __future__ import annotations

import numpy as np

from ._compile import inlined, prefetch


LINE = 64
"""Bytes that one fetch brings."""
_LINES_AHEAD = 64
"""Cache lines between fetching and use; measured, flat from 32 to 128."""
_MOST_ROWS_AHEAD = 32


@inlined
def rows_ahead(features: np.ndarray) -> int:
    """Rows between fetching and use: many narrow ones, few wide ones."""
    lines = 1 + features.shape[1] * features.itemsize // LINE
    return max(1, min(_MOST_ROWS_AHEAD, _LINES_AHEAD // lines))


@inlined
def fetch_row(features: np.ndarray, node: int, step: int) -> None:
    """Fetches all lines of a row; a line has ``step`` elements."""
    # an index and no second array: numba counts references to each array that is handed on, at the price of a short row
    at = np.int64(node) * features.shape[1]
    end = at + features.shape[1]
    # no range: it would divide by a step that is no constant, once a row
    while at < end:
        prefetch(features, at)
        at += step
    # rows seldom begin with a line, so that their end may lie in one more
    prefetch(features, end - 1)
