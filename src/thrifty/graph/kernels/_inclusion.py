"""Spread of a sum over sampled edges from nodes to their neighbours."""

from __future__ import annotations

import numpy as np

from ._compile import kernel, prefetch


AHEAD = 32
"""Edges between prefetch and use."""


@kernel
def push(
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, sums: np.ndarray
) -> None:
    """Add the weight of each node to the sum of each of its neighbours, once for each edge."""
    num = len(indices)
    for node in range(len(weights)):
        weight = weights[node]
        # Most nodes are out of reach in early hops.
        if weight == 0.0:
            continue
        for e in range(indptr[node], indptr[node + 1]):
            if e + AHEAD < num:
                prefetch(sums, indices[e + AHEAD])
            sums[indices[e]] += weight
