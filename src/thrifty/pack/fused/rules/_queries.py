"""Rules for queries about a tensor whose answer is the same for all trials."""

from __future__ import annotations

from collections.abc import Callable
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
