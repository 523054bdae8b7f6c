"""Rules for convolutions: one grouped convolution over K x channels.

Where all trials see the same images, the convolution is ungrouped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES

from ._channels import flat, fold, laid_out, unfold


def convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``."""

    def rule(
        group: Group,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Packed:
        images, batched = _batched(input, weight)
        if type(input) is Packed or groups != 1:
            images, groups = fold(group, images), groups * group.size
        else:
            images = laid_out(group, images)
        w, b = _filters(group, weight), flat(group, bias)
        out = function(images, w, b, stride, padding, dilation, groups)
        return _unfolded(group, out, batched=batched)

    return rule


def transposed_convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``F.conv_transpose1d``, ``2d`` or ``3d``."""

    def rule(
        group: Group,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Packed:
        images, batched = _batched(input, weight)
        if type(input) is Packed or groups != 1:
            # pack first, since shared images may need channels-last layout too
            images = group.pack(group.second(images), 1)
            images, groups = fold(group, images), groups * group.size
            w = _filters(group, weight)  # [K * in, out / groups, ...]
        else:
            w = group.first(weight).transpose(0, 1).flatten(1, 2)  # [in, K * out, ...]
        b = flat(group, bias)
        out = function(images, w, b, stride, padding, output_padding, groups, dilation)
        return _unfolded(group, out, batched=batched)

    return rule


def _batched(images: Any, weight: Any) -> tuple[Any, bool]:
    """Return images with a batch dimension in front, and whether they had one before."""
    batched = images.dim() == weight.dim()
    return (images if batched else images.unsqueeze(0)), batched


def _filters(group: Group, weight: Any) -> torch.Tensor:
    w = group.first(weight)
    return w.reshape(-1, *w.shape[2:])


def _unfolded(group: Group, out: torch.Tensor, *, batched: bool) -> Packed:
    packed = unfold(group, out)
    return packed if batched else group.pack(packed.value.squeeze(0))


for _function in (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d):
    RULES[_function] = convolution(_function)
for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    RULES[_function] = transposed_convolution(_function)
