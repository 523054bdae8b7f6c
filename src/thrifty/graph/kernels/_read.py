"""Second pass of a hop: read the neighbours that the chosen edges lead to.

Indices that come from memory are made unsigned. Otherwise numba would check each of them for being
negative, which would count from the end.
"""

from __future__ import annotations

import numpy as np

from ._compile import kernel, prefetch


AHEAD = 32
"""Edges between prefetch and use."""


@kernel
def read_neighbors(indices: np.ndarray, picks: np.ndarray, out: np.ndarray) -> None:
    """Write ``out[e] = indices[picks[e]]`` for all edges."""
    num = len(picks)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(indices, picks[np.uint64(e + AHEAD)])
        out[e] = indices[np.uint64(picks[e])]
