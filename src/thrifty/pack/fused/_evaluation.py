"""The metrics of all trials of a block at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._data import Source
from thrifty.pack._metric_sums import MetricSums

from ._programs import Programs


MAX_ELEMENTS = 2**22
"""Elements of packed validation batches beyond which there is nothing to gain over one trial after the other."""


def evaluate_packed(
    programs: Programs, source: Source, *, size: int, batch_size: int
) -> Sequence[Mapping[str, float]] | None:
    """The metrics of the first ``size`` rows; None where batches are too large for that to pay."""
    sums = MetricSums()
    for batch, num in source.valid_batches(batch_size=batch_size):
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if size * sum(leaf.numel() for leaf in leaves) > MAX_ELEMENTS:
            return None
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        bound = programs.evaluation(size, shapes)
        for leaf, target in zip(leaves, bound.batch, strict=True):
            target.copy_(leaf)
        with torch.no_grad():
            bound.tape()
        sums.add(dict(zip(bound.names, bound.tape.outputs, strict=True)), num=num)
    return sums.rows(size)
