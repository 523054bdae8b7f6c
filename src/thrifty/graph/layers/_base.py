"""Input checks that all layers share."""

from __future__ import annotations

import torch
from torch import Tensor

from thrifty.core import GraphError
from thrifty.graph._block import Block


def check_input(
    x: Tensor, block: Block, *, in_features: int | None = None, weight: Tensor | None = None
) -> None:
    """Check that ``x`` fits the block and the layer.

    ``x`` needs a row for each source of the block, the device of the block, and features that fit
    the layer.

    Raises:
        GraphError: ``x`` does not fit.
    """
    if x.dim() != 2 or x.shape[0] != block.num_src:
        raise GraphError(
            f"x has shape {tuple(x.shape)}, and the block {block.num_src} sources: give a row "
            "for each, such as batch.x for batch.blocks[0]"
        )
    if in_features is not None and x.shape[1] != in_features:
        raise GraphError(f"x has {x.shape[1]} features, and the layer takes {in_features}")
    if x.device != block.device:
        raise GraphError(
            f"x lies on {x.device} and the block on {block.device}; move both, as "
            "batch.to(device) does"
        )
    if weight is None:
        if not x.is_floating_point():
            raise GraphError(f"x is {x.dtype}, and features are real numbers; give x.float()")
        return
    if weight.device != x.device:
        raise GraphError(
            f"x lies on {x.device} and the layer on {weight.device}; give "
            f"layer.to({str(x.device)!r}) or move the batch"
        )
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise GraphError(
            f"x is {x.dtype} and the layer {weight.dtype}; give x.to({weight.dtype}), or "
            f"change the layer's with layer.to({x.dtype})"
        )


def check_probability(value: float) -> None:
    """Check that a dropout rate is a probability.

    Raises:
        GraphError: the rate is not a probability.
    """
    if not 0.0 <= value <= 1.0:
        raise GraphError(f"dropout={value!r}; give a probability from 0 to 1")
