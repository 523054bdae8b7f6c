"""Rule for batch normalisation over K x channels, running statistics included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import UnfusableError, register_rule

from ._channels import flat, fold, unfold


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
