"""Rules for layers with channels: convolution, pooling and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._fusable import RULES, UnfusableError, register_rule
from thrifty.pack.fused._packed import Group, Packed, by_vmap


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
        if type(weight) is not Packed and type(bias) is not Packed:
            run = partial(
                function,
                weight=weight,
                bias=bias,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
            )
            return _of_all_images(group, run, images, batched=batched)
        if (
            type(input) is Packed
            and groups == 1
            and not group.channels_last
            and _is_product(weight, padding=padding, dilation=dilation)
            and _copied_bytes(images.value, weight, stride=stride) <= MOST_COPIED
        ):
            out = _by_product(group, images, weight, bias, stride=stride, padding=padding)
            return out if batched else group.pack(out.value.squeeze(0))
        if type(input) is Packed or groups != 1:
            images, groups = fold(group, images), groups * group.size
        else:
            images = laid_out(group, images)
        w, b = _filters(group, weight), flat(group, bias)
        out = function(images, w, b, stride, padding, dilation, groups)
        return _unfolded(group, out, batched=batched)

    return rule


def _of_all_images(
    group: Group, function: Callable[..., torch.Tensor], images: Packed, *, batched: bool
) -> Packed:
    """Apply a function with the same filters for all trials to the images of all in one batch."""
    axis = min(images.axis, 1)
    x = images.value if images.axis == axis else images.value.movedim(images.axis, 0)
    axis = axis if images.axis == axis else 0
    out = function(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-untyped-call]
    packed = group.pack(out, axis)
    return packed if batched else group.pack(packed.value.squeeze(1 - axis), 0)


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


MOST_INPUTS = 160
"""Numbers that a filter reads, up to which a convolution on a GPU is a matrix product.

cuDNN's grouped convolutions of so few channels spend most of their time on other memory layouts.
"""


def _is_product(weight: Any, *, padding: Any, dilation: Any) -> bool:
    """Return whether to compute a convolution as a product of each trial's own matrices."""
    return (
        weight.dim() == 4
        and not isinstance(padding, str)
        and _pair(dilation) == (1, 1)
        and math.prod(weight.shape[1:]) <= MOST_INPUTS
        and _prefers_products(weight.device)
    )


MOST_COPIED = 2**29
"""Bytes of copied inputs, up to which a convolution is a product; the backward pass needs them."""


def _copied_bytes(images: torch.Tensor, weight: Any, *, stride: Any) -> int:
    """Return about how many bytes the inputs of all positions have, for all trials."""
    area: int = math.prod(weight.shape[2:])
    return images.numel() * images.element_size() * area // math.prod(_pair(stride))


def _prefers_products(device: torch.device) -> bool:
    return device.type == "cuda"


def _by_product(
    group: Group, images: Packed, weight: Any, bias: Any, *, stride: Any, padding: Any
) -> Packed:
    """Copy the inputs of each filter position into a matrix, and multiply it by the filters."""
    x, w = group.first(images), group.first(weight)  # [K, B, C, H, W], [K, out, C, h, w]
    high, wide = w.shape[-2:]
    (down, right), (above, left) = _pair(stride), _pair(padding)
    if above or left:
        x = F.pad(x, (left, left, above, above))
    places = x.unfold(3, high, down).unfold(4, wide, right)  # [K, B, C, H', W', h, w]
    num_batch, (rows, columns) = places.shape[1], places.shape[3:5]
    inputs = places.permute(0, 2, 5, 6, 1, 3, 4).reshape(len(x), -1, num_batch * rows * columns)
    filters = w.reshape(*w.shape[:2], -1)
    if bias is None:
        out = torch.bmm(filters, inputs)
    else:
        out = torch.baddbmm(group.first(bias).unsqueeze(2), filters, inputs)
    # In the layout that a trial has alone: masks of dropout depend on it, and ``fold`` needs it.
    out = out.view(len(x), -1, num_batch, rows, columns).permute(2, 0, 1, 3, 4).contiguous()
    return group.pack(out, 1)


def _pair(number: Any) -> tuple[int, int]:
    first, last = (number, number) if isinstance(number, int) else (number[0], number[-1])
    return int(first), int(last)


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


@register_rule(F.batch_norm)
def batch_norm(
    group: Group,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Packed:
    """Compute one batch norm of ``K * C`` channels."""
    if training and group.rows is not None:
        raise UnfusableError("batch normalisation over batches that differ in size")
    return over_channels(
        group,
        partial(F.batch_norm, training=training, momentum=momentum, eps=eps),
        input,
        running=(running_mean, running_var),
        affine=(weight, bias),
        training=training,
    )


def over_channels(
    group: Group,
    normalise: Callable[..., torch.Tensor],
    images: Any,
    *,
    running: tuple[Any, Any],
    affine: tuple[Any, Any],
    training: bool,
) -> Packed:
    """Call ``normalise(x, mean, var, weight, bias)`` for K x C channels.

    In training, the call also updates ``running``.
    """
    folded = [flat(group, t) for t in running]
    out = normalise(fold(group, images), *folded, *[flat(group, t) for t in affine])
    if training:
        for whole, changed in zip(running, folded, strict=True):
            _write_back(group, whole, changed)
    return unfold(group, out)


def _write_back(group: Group, whole: Any, changed: torch.Tensor | None) -> None:
    if whole is None or changed is None:
        return
    if type(whole) is not Packed:
        raise UnfusableError("running statistics that all trials share")
    original = group.first(whole)
    if original.data_ptr() != changed.data_ptr():  # flattening had to make a copy
        original.copy_(changed.view(original.shape))


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    group: Group,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Packed:
    """Normalise ``K * num_groups`` groups of channels, or ``K * B`` rows, whichever needs no copy.

    A shared input is normalised once for all trials.
    """
    if type(input) is not Packed:
        normal = F.group_norm(input, num_groups, eps=eps).unsqueeze(1)
        out = affine(normal, _lined_up(group, weight, input), _lined_up(group, bias, input))
        return group.pack(out.expand(-1, group.size, *out.shape[2:]), 1)
    if input.axis == 0:
        x = input.value
        rows = x.reshape(-1, *x.shape[2:])
        normal = F.group_norm(rows, num_groups, eps=eps).view(x.shape)
        w, b = (_lined_up(group, t, input) for t in (weight, bias))
        return group.pack(affine(normal, _first(w), _first(b)))
    w, b = flat(group, weight), flat(group, bias)
    return unfold(group, F.group_norm(fold(group, input), num_groups * group.size, w, b, eps))


def _lined_up(group: Group, x: Any, images: Any) -> torch.Tensor | None:
    """Return a parameter as ``[K, C, 1, ...]``; None stays None."""
    if x is None:
        return None
    whole = group.first(x)
    return whole.reshape(*whole.shape, *[1] * (images.dim() - 2))


def _first(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.unsqueeze(1)


@register_rule(F.instance_norm)
def instance_norm(
    group: Group,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Packed:
    """Compute one instance norm of ``K * C`` channels."""
    training = use_input_stats and running_mean is not None
    if training and group.rows is not None:
        raise UnfusableError("running statistics of batches that differ in size")
    return over_channels(
        group,
        partial(F.instance_norm, use_input_stats=use_input_stats, momentum=momentum, eps=eps),
        input,
        running=(running_mean, running_var),
        affine=(weight, bias),
        training=training,
    )


@register_rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    group: Group,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Packed:
    """Compute layer norm; the trial dimension stays among those that are not normalised."""
    return _norm(
        group,
        lambda x: F.layer_norm(x, tuple(normalized_shape), eps=eps),
        input,
        num_normalized=len(normalized_shape),
        weight=weight,
        bias=bias,
    )


@register_rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    group: Group,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Packed:
    """Compute RMS norm like layer norm, without a shift."""
    return _norm(
        group,
        lambda x: F.rms_norm(x, tuple(normalized_shape), eps=eps),
        input,
        num_normalized=len(normalized_shape),
        weight=weight,
        bias=None,
    )


def _norm(
    group: Group,
    normalise: Callable[[torch.Tensor], torch.Tensor],
    x: Any,
    *,
    num_normalized: int,
    weight: Any,
    bias: Any,
) -> Packed:
    if type(x) is not Packed:  # a shared input is normalised only once
        out = normalise(x)
        axis = 0
        shape = out.shape
    else:
        axis = x.axis if x.axis <= x.ndim - num_normalized else 0
        value = x.value if x.axis == axis else x.value.movedim(x.axis, axis)
        out = normalise(value)
        shape = x.shape
    # number of dimensions between the trial dimension and the normalised ones
    before = len(shape) - num_normalized - axis
    out = affine(out, _between(group, weight, before), _between(group, bias, before))
    if out.dim() == len(shape):  # the result is the same for all trials
        out = out.expand(group.size, *shape)
    return group.pack(out, axis)


def _between(group: Group, x: Any, before: int) -> torch.Tensor | None:
    if x is None or type(x) is not Packed:
        return x  # type: ignore[no-any-return]
    w = group.first(x)
    return w.reshape(group.size, *[1] * before, *w.shape[1:])


def affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x * weight + bias``, where weight and bias may be None."""
    if weight is None:
        return x if bias is None else x + bias
    return x * weight if bias is None else torch.addcmul(bias, x, weight)
