"""One complete batch: neighbourhood, features and labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ._batch import Batch
from ._features import gather_features
from ._memory import Memory
from ._sampler import NeighborSampler


def make_batch(
    sampler: NeighborSampler,
    seeds: Any,
    *,
    epoch: int = 0,
    index: int = 0,
    dtype: torch.dtype | None = None,
    memory: Memory | None = None,
) -> Batch:
    """Sample around some seeds and gather features and labels, all in the calling thread.

    Args:
        sampler: sampler on the graph that has the features and labels.
        seeds: node numbers, shape ``(num,)``; duplicates get one row.
        epoch: see ``NeighborSampler.sample``.
        index: number of the batch; see ``NeighborSampler.sample``.
        dtype: dtype of the features: that of the graph or float32; None for that of the graph.
        memory: pool to take the features' memory from; None for fresh memory.

    Returns:
        A batch with ``x`` and ``y``; each is None where the graph has none.

    Raises:
        GraphError: a seed does not exist, or the features cannot be converted to this dtype.

    >>> import numpy as np
    >>> from thrifty.graph import Graph
    >>> ring = Graph(
    ...     np.arange(4),
    ...     np.array([1, 2, 0], dtype=np.int32),
    ...     x=torch.eye(3),
    ...     y=torch.tensor([5, 6, 7]),
    ... )
    >>> batch = make_batch(NeighborSampler(ring, [1]), [2, 1])
    >>> batch.nodes, batch.y
    (tensor([2, 1, 0]), tensor([7, 6]))
    >>> bool((batch.x == ring.x[batch.nodes]).all())
    True
    """
    graph = sampler.graph
    batch = sampler.sample(seeds, epoch=epoch, batch=index)
    x = y = None
    if graph.x is not None:
        x = gather_features(graph.x, batch.nodes, dtype=dtype, memory=memory)
    if graph.y is not None:
        y = graph.y.index_select(0, batch.seeds)
    return replace(batch, x=x, y=y)
