"""Rules for layer and RMS normalisation: once over all trials, then scale and shift per trial."""

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


def affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x * weight + bias``, where weight and bias may be None."""
    if weight is None:
        return x if bias is None else x + bias
    return x * weight if bias is None else torch.addcmul(bias, x, weight)
