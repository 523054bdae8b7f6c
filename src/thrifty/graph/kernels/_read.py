"""Second pass of a hop: which neighbours the chosen edges lead to."""

from __future__ import annotations

import numpy as np

from ._compile import kernel, prefetch


AHEAD = 32
"""Edges between fetching and use."""


@kernel
def read_neighbors(indices: np.ndarray, picks: np.ndarray, out: np.ndarray) -> None:
    """``out[e] = indices[picks[e]]``."""
    num = len(picks)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(indices, picks[e + AHEAD])
        out[e] = indices[picks[e]]
