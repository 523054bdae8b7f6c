"""Convolutions: one grouped convolution over K x channels; an ungrouped one where all trials see the same images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import RULES


def convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``."""

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
        w, b = _filters(group, weight, bias)
        batched = input.dim() == weight.dim()
        x, groups = _images(group, input if batched else input.unsqueeze(0), groups)
        out = function(x, w, b, stride, padding, dilation, groups)
        return _unfold(group, out, batched=batched)

    return rule


def transposed_convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of ``F.conv_transpose1d``, ``F.conv_transpose2d`` or ``F.conv_transpose3d``."""

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
        batched = input.dim() == weight.dim()
        images = input if batched else input.unsqueeze(0)
        w, b = _filters(group, weight, bias)  # [K * in, out / groups, ...]
        if (
            type(input) is not Packed and groups == 1
        ):  # [in, K * out, ...]: more channels come out
            w = group.first(weight).transpose(0, 1).flatten(1, 2)
            x = images
        else:
            x, groups = _images(group, group.pack(group.second(images), 1), groups)
        out = function(x, w, b, stride, padding, output_padding, groups, dilation)
        return _unfold(group, out, batched=batched)

    return rule


def _filters(group: Group, weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    w = group.first(weight)
    b = None if bias is None else group.first(bias).reshape(-1)
    return w.reshape(-1, *w.shape[2:]), b


def _images(group: Group, images: Any, groups: int) -> tuple[torch.Tensor, int]:
    if type(images) is not Packed and groups == 1:
        return images, 1
    x = group.second(images)
    return x.reshape(x.shape[0], -1, *x.shape[3:]), groups * group.size


def _unfold(group: Group, out: torch.Tensor, *, batched: bool) -> Packed:
    out = out.view(out.shape[0], group.size, -1, *out.shape[2:])
    return group.pack(out, 1) if batched else group.pack(out.squeeze(0))


for _function in (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d):
    RULES[_function] = convolution(_function)
for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    RULES[_function] = transposed_convolution(_function)
