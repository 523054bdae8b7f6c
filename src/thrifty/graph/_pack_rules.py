"""Packing rules of aggregates and dropout, for trials trained as one batched computation."""

from __future__ import annotations

import torch.nn.functional as F

from thrifty.pack import Group, Packed, register_rule

from . import _aggregate, _gnn
from ._aggregate import mean_and_own, neighbor_mean, neighbor_sum, uses_kernels
from ._batch import Block
from ._gnn import draw_key, relu_dropout


@register_rule(neighbor_mean)
def mean(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``neighbor_mean`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=True, own=False))


@register_rule(neighbor_sum)
def total(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``neighbor_sum`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=False, own=False))


@register_rule(mean_and_own)
def beside(group: Group, x: Packed, block: Block) -> Packed:
    """Apply ``mean_and_own`` to each trial."""
    return group.pack(_aggregate.of_each(group.first(x), block, mean=True, own=True))


@register_rule(relu_dropout)
def drop(group: Group, x: Packed, p: float, *, inplace: bool = False) -> Packed:
    """Apply ``relu_dropout`` with each trial's own key and probability."""
    value = group.first(x)
    if not (uses_kernels(value) and value.is_contiguous()):
        return F.dropout(x.relu_() if inplace else x.relu(), p)  # type: ignore[return-value]
    randomness = group.randomness
    draws = [
        # A trial on its own draws no number either if the rate is 0 or 1.
        (rate, draw_key(generator) if 0.0 < rate < 1.0 else 0)
        for rate, generator in zip(randomness.rates_of(p), randomness.generators, strict=True)
    ]
    out = _gnn.of_each(value, draws, inplace=inplace)
    if inplace:
        x.value, x.axis = out, 0
        return x
    return group.pack(out)
