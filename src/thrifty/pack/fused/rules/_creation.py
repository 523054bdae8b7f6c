"""Rules for new tensors made like packed ones: each trial gets its own, to write into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES


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
