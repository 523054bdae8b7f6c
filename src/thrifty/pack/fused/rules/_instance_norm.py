"""Rule for instance normalisation over K x channels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import UnfusableError, register_rule

from ._batch_norm import over_channels


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
