"""Gradient buckets: how a gradient is divided, and when each bucket is complete."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from thrifty.core import HeteroError


_MIB = 2**20
_CAPS = (1 * _MIB, 25 * _MIB)
"""Byte caps of the first bucket and of the others, as in PyTorch's DDP."""


def median_shape(shapes: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return when each gradient is ready: the median share of the backward pass, by parameter."""
    return {
        at: median(shape[at] for shape in shapes if at in shape)
        for at in sorted(set().union(*shapes))
    }


def gradient_buckets(
    parameters: Sequence[nn.Parameter], ready: dict[int, float]
) -> list[tuple[float, float]]:
    """Return the size and the completion time of each bucket, in the order of their sums.

    Each bucket holds tensors of one dtype and device.

    Args:
        parameters: Parameters in the order in which a backward pass reaches them.
        ready: For each parameter with a gradient, the share of the backward pass after which the
            gradient is ready.

    Returns:
        Pairs of a bucket's bytes and the share of the backward pass after which it is complete.

    Raises:
        HeteroError: No parameter got a gradient.
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
        # Buckets are summed in order, so a bucket waits for all buckets before it.
        latest = max(latest, *(ready[at] for at in members))
        out.append((float(num_bytes(members)), latest))
    return out
