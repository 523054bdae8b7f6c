"""Instance normalisation over K x channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import UnfusableError, register_rule

from ._batch_norm import over_channels
from ._group_norm import flat


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
    """As one instance norm of ``K * C`` channels."""
    training = use_input_stats and running_mean is not None
    if training and group.rows is not None:
        raise UnfusableError("running statistics of batches that differ in size")

    def normalise(x: torch.Tensor, mean: Any, var: Any) -> torch.Tensor:
        w, b = flat(group, weight), flat(group, bias)
        return F.instance_norm(x, mean, var, w, b, use_input_stats, momentum, eps)

    return over_channels(
        group, normalise, input, (running_mean, running_var), training=training
    )
