"""The loss that workers minimise together, and how the losses of their shares add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from thrifty.core import HeteroError


Loss = Callable[[nn.Module, Any], Tensor]
"""Computes a scalar from a model and a batch."""

Weight = Callable[[Any], "float | Tensor"]
"""Returns what the loss of a batch divides by, such as the number of its tokens."""

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, and how the losses of parts of a batch combine to it.

    Args:
        loss: Function from a model and a batch to a scalar.
        reduction: Whether the loss of a batch is the mean of its parts' losses, or their sum.
        weight: Weight of a part in that mean (default: its number of samples).

    Raises:
        HeteroError: ``reduction`` is unknown, or a sum has weights.
    """

    loss: Loss
    reduction: Reduction = "mean"
    weight: Weight | None = None

    def __post_init__(self) -> None:
        if self.reduction not in {"mean", "sum"}:
            raise HeteroError(f"`reduction` must be 'mean' or 'sum', got {self.reduction!r}")
        if self.weight is not None and self.reduction == "sum":
            raise HeteroError(
                "`weight` belongs to a mean, and `reduction` is 'sum'; pass one of the two"
            )

    @property
    def has_weights(self) -> bool:
        """Whether the weight of a part differs from its number of samples."""
        return self.weight is not None

    def weigh(self, batch: Any, num: int) -> float:
        """Return the weight of a part of ``num`` samples.

        Raises:
            HeteroError: The user's function returned an invalid weight.
        """
        if self.weight is None:
            return float(num)
        weight = float(self.weight(batch))
        if not (math.isfinite(weight) and weight >= 0):
            raise HeteroError(
                f"`weight` returned {weight} for a batch of {num} samples; it must return a finite "
                "number >= 0, such as the number of tokens that count"
            )
        return weight
