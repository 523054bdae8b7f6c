"""Second pass of a hop: which neighbours the chosen edges lead to.

Indices that come from memory are made unsigned: a negative one would count from the end, and each is looked at for that.
"""

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
            prefetch(indices, picks[np.uint64(e + AHEAD)])
        out[e] = indices[np.uint64(picks[e])]
