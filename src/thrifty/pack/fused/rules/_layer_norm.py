"""Layer and RMS normalisation: once over all trials, then each trial's own scale and shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import register_rule


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
    """The trials stay where they are, among the dimensions that are not normalised."""
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
    """As layer norm, without a shift."""
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
    if type(x) is not Packed:  # the work is shared too
        out = normalise(x)
        axis = 0
        shape = out.shape
    else:
        axis = x.axis if x.axis <= x.ndim - num_normalized else 0
        value = x.value if x.axis == axis else x.value.movedim(x.axis, axis)
        out = normalise(value)
        shape = x.shape
    before = len(shape) - num_normalized - axis  # dimensions between the trials and the weights
    out = affine(out, _between(group, weight, before), _between(group, bias, before))
    if out.dim() == len(shape):  # nothing in it differs from trial to trial
        out = out.expand(group.size, *shape)
    return group.pack(out, axis)


def _between(group: Group, x: Any, before: int) -> torch.Tensor | None:
    if x is None or type(x) is not Packed:
        return x  # type: ignore[no-any-return]
    w = group.first(x)
    return w.reshape(group.size, *[1] * before, *w.shape[1:])


def affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x * weight + bias``, either of which may be missing."""
    if weight is None:
        return x if bias is None else x + bias
    return x * weight if bias is None else torch.addcmul(bias, x, weight)
