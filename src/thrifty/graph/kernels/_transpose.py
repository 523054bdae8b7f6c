"""Who receives from each source: the transposed rows of a block."""

from __future__ import annotations

import numpy as np

from ._compile import kernel


@kernel
def transpose(
    indptr: np.ndarray,
    indices: np.ndarray,
    starts: np.ndarray,
    destinations: np.ndarray,
    edges: np.ndarray,
) -> None:
    """Counting sort of the edges by their source; the order of edges stays.

    Args:
        indptr: rows by destination.
        indices: the source of each edge.
        starts: zeros, one more than there are sources; gets where their rows begin and end.
        destinations: gets the destination of each edge, source after source.
        edges: gets the number of each edge likewise.
    """
    num = len(starts) - 1
    for e in range(len(indices)):
        starts[np.uint64(indices[e])] += 1
    total = 0
    for j in range(num):
        count = starts[j]
        starts[j] = total
        total += count
    starts[num] = total
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            j = np.uint64(indices[np.uint64(e)])
            at = np.uint64(starts[j])
            destinations[at] = i
            edges[at] = e
            starts[j] += 1
    # each start is now where the next one was
    for j in range(num, 0, -1):
        starts[j] = starts[j - 1]
    if num > 0:
        starts[0] = 0
