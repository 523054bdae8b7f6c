"""Changes of shape, new tensors, and questions about tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES, UnfusableError, register_rule


@register_rule(torch.numel)
def numel(group: Group, input: Packed) -> int:
    """Return the number of elements of one trial's tensor."""
    return input.numel()


def query(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for a function of a tensor's dtype."""

    def rule(group: Group, input: Packed) -> Any:
        return function(input.value)

    return rule


@register_rule(torch._nested_tensor_from_mask_left_aligned)
def left_aligned(group: Group, input: Any, mask: Any) -> bool:
    """Return False with gradients on; refuse without gradients.

    ``nn.TransformerEncoder`` asks this in evaluation. Alone and without gradients, it gives zeros
    for padding.
    """
    if torch.is_grad_enabled():
        return False
    raise UnfusableError(
        "nn.TransformerEncoder evaluates on nested tensors; pass enable_nested_tensor=False"
    )


for _function in (torch.is_floating_point, torch.is_complex):
    RULES[_function] = query(_function)


def like(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.zeros_like`` and similar functions."""

    def rule(group: Group, input: Packed, *args: Any, **kwargs: Any) -> Packed:
        return group.pack(function(input.value, *args, **kwargs), input.axis)

    return rule


def new(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``torch.Tensor.new_zeros`` and similar functions."""

    def rule(group: Group, input: Packed, size: Any, *args: Any, **kwargs: Any) -> Packed:
        if isinstance(size, int):
            size, args = (size, *args), ()
        return group.pack(function(input.value, (group.size, *size), *args, **kwargs))

    return rule


for _function in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like):
    RULES[_function] = like(_function)
for _function in (
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
):
    RULES[_function] = new(_function)


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
