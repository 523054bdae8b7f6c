"""Rule for group normalisation, which treats the groups of all trials as more groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import register_rule

from ._channels import flat, fold, unfold
from ._layer_norm import affine


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
