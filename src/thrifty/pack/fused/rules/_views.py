"""Rules for changes of shape.

The trial dimension stays in place as long as the batch stays in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import register_rule


@register_rule(torch.Tensor.view, torch.Tensor.reshape, torch.reshape)
def reshape(group: Group, input: Packed, *shape: Any, **kwargs: Any) -> Any:
    """Compute ``view`` and ``reshape``."""
    wanted = kwargs.get("shape", kwargs.get("size", shape))
    if len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        return group.pack(input.value.view(wanted[0]), input.axis)
    if len(wanted) == 1 and not isinstance(wanted[0], int):
        wanted = wanted[0]
    return _reshaped(group, input, [int(n) for n in wanted])


@register_rule(torch.flatten, torch.Tensor.flatten)
def flatten(group: Group, input: Packed, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Compute ``flatten``."""
    shape = input.shape
    if not shape:
        return _reshaped(group, input, [1])
    first, last = start_dim % len(shape), end_dim % len(shape)
    merged = shape[first : last + 1].numel()
    return _reshaped(group, input, [*shape[:first], merged, *shape[last + 1 :]])


def _reshaped(group: Group, x: Packed, shape: Sequence[int]) -> Packed:
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape = [x.numel() // known if n == -1 else n for n in shape]
    if x.axis == 1 and len(shape) > 1 and shape[0] == x.shape[0]:
        if group.channels_last and x.dim() == 4:  # restore the memory layout that it has alone
            x = group.pack(x.value.contiguous(), 1)
        return group.pack(x.value.reshape(shape[0], group.size, *shape[1:]), 1)
    return group.pack(group.first(x).reshape(group.size, *shape))
