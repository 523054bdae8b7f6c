"""Questions about a tensor whose answer is the same for all trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES, UnfusableError, register_rule


@register_rule(torch.numel)
def numel(group: Group, input: Packed) -> int:
    """Of one trial."""
    return input.numel()


def query(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a function of a tensor's type."""

    def rule(group: Group, input: Packed) -> Any:
        return function(input.value)

    return rule


@register_rule(torch._nested_tensor_from_mask_left_aligned)
def left_aligned(group: Group, input: Any, mask: Any) -> bool:
    """nn.TransformerEncoder asks this in evaluation; alone, without gradients, it gives zeros for what is padding."""
    if torch.is_grad_enabled():
        return False
    raise UnfusableError(
        "nn.TransformerEncoder evaluates on nested tensors; pass enable_nested_tensor=False"
    )


for _function in (torch.is_floating_point, torch.is_complex):
    RULES[_function] = query(_function)
