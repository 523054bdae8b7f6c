"""Rules of convolutions, pooling and channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed, by_vmap
from thrifty.pack.fused._registry import RULES


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


_function: Callable[..., Any]
for _function in (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d):
    RULES[_function] = convolution(_function)
for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    RULES[_function] = transposed_convolution(_function)


def pooling(function: Callable[..., Any], *, num_spatial: int) -> Callable[..., Any]:
    """Return the rule for a pooling function over the last ``num_spatial`` dimensions."""

    def rule(group: Group, input: Packed, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != num_spatial + 2 or kwargs.get("return_indices"):
            return by_vmap(group, function, (input, *args), kwargs)
        return unfold(group, function(fold(group, input), *args, **kwargs))

    return rule


for _spatial, _functions in {
    1: (F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d),
    2: (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    3: (F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d),
}.items():
    for _function in _functions:
        RULES[_function] = pooling(_function, num_spatial=_spatial)


def fold(group: Group, images: Any) -> torch.Tensor:
    """Return images of K x C channels, ``[B, K * C, ...]``."""
    x = group.second(images)
    return laid_out(group, x.reshape(x.shape[0], -1, *x.shape[3:]))


def laid_out(group: Group, images: torch.Tensor) -> torch.Tensor:
    """Give one-channel images channels-last strides where the group uses channels last.

    One channel looks the same in memory in both layouts. Only the strides say which layout is
    meant, and the functions that follow keep to it.
    """
    if group.channels_last and images.dim() == 4 and images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return images


def unfold(group: Group, out: torch.Tensor) -> Packed:
    """Return a packed tensor from one of shape ``[B, K * C, ...]``."""
    return group.pack(out.view(out.shape[0], group.size, -1, *out.shape[2:]), 1)


def flat(group: Group, x: Any) -> torch.Tensor | None:
    """Return a parameter of K x C channels as ``[K * C]``; None stays None."""
    return None if x is None else group.first(x).reshape(-1)
