"""How a gradient falls into buckets, and when each of them is complete."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from thrifty.core import HeteroError


_MIB = 2**20
_CAPS = (1 * _MIB, 25 * _MIB)
"""Of the first bucket and of the others, as in PyTorch's DDP."""


def median_shape(shapes: Sequence[dict[int, float]]) -> dict[int, float]:
    """By parameter: the median share of the backward pass after which its gradient was there."""
    return {
        at: median(shape[at] for shape in shapes if at in shape)
        for at in sorted(set().union(*shapes))
    }


def gradient_buckets(
    parameters: Sequence[nn.Parameter], ready: dict[int, float]
) -> list[tuple[float, float]]:
    """Bytes of each bucket and when it is complete, in the order in which they begin; one kind of tensor each.

    Args:
        parameters: in the order in which a backward pass comes to them.
        ready: of each one that got a gradient, the share of the pass after which it was there.

    Raises:
        HeteroError: none of them got one.
    """
    if not ready:
        raise HeteroError("no parameter got a gradient: the loss depends on none of them")
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    closed: list[list[int]] = []
    started: set[tuple[torch.dtype, torch.device]] = set()

    def num_bytes(members: Sequence[int]) -> int:
        return sum(parameters[at].numel() * parameters[at].element_size() for at in members)

    for at in sorted(ready):
        kind = parameters[at].dtype, parameters[at].device
        filling.setdefault(kind, []).append(at)
        if num_bytes(filling[kind]) >= _CAPS[kind in started]:
            closed.append(filling.pop(kind))
            started.add(kind)
    out, latest = [], 0.0
    for members in [*closed, *filling.values()]:
        # A bucket waits for its turn, whoever else is complete.
        latest = max(latest, *(ready[at] for at in members))
        out.append((float(num_bytes(members)), latest))
    return out
