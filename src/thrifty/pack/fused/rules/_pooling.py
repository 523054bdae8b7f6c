"""Rules for pooling, which treat the trials as more channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed, by_vmap
from thrifty.pack.fused._registry import RULES

from ._channels import fold, unfold


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
