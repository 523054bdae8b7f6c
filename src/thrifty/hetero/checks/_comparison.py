"""Compares the gradient of a batch with that of its parts, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thrifty.hetero.training._learner import Reduction


_NOISE = 0.01
"""A gradient this much smaller than the largest one may consist of rounding errors only."""


class Pass(NamedTuple):
    """The result of one pass.

    Attributes:
        loss: Loss of its samples.
        weight: Weight of its samples in the mean.
        gradients: Gradients by parameter.
        values: Values that it left in buffers, attributes and closures, by name.
        eps: Machine epsilon of the coarsest precision in which anything was computed.
        draws: Text that describes its random draws; equal texts mean equal draws.
    """

    loss: float
    weight: float
    gradients: dict[str, Tensor]
    values: dict[str, Any]
    eps: float
    draws: str


class Comparison:
    """A comparison of a whole batch with its parts.

    Attributes:
        difference: Description of what differs; None if nothing does.
    """

    def __init__(
        self, passes: Sequence[Pass], sizes: Sequence[int], *, reduction: Reduction
    ) -> None:
        self.passes = passes
        self.sizes = sizes
        self.difference = self._difference(reduction)

    @property
    def draws(self) -> bool:
        """Whether the passes drew different random numbers, or may have."""
        return len({each.draws for each in self.passes}) > 1 or "?" in self.passes[0].draws

    @property
    def is_sum(self) -> bool:
        return self._difference("sum") is None

    @property
    def is_mean(self) -> bool:
        num, *parts = self.sizes
        return self._difference("mean", [size / num for size in parts]) is None

    def _difference(self, reduction: str, factors: Sequence[float] | None = None) -> str | None:
        whole, *parts = self.passes
        if not math.isfinite(whole.loss):
            return None  # training itself reports a loss that diverges
        if factors is None:
            total = sum(part.weight for part in parts)
            factors = [1.0 if reduction == "sum" else p.weight / (total or 1.0) for p in parts]
        counted = [(part, f) for part, f in zip(parts, factors, strict=True) if f]
        loss = sum(factor * part.loss for part, factor in counted)
        gradients = {
            name: sum((factor * part.gradients[name] for part, factor in counted), 0 * value)
            for name, value in whole.gradients.items()
        }
        sizes = {
            name: max(
                (float(part.gradients[name].abs().max()) for part, _ in counted), default=0
            )
            for name, value in whole.gradients.items()
            if value.numel()
        }
        return largest_difference(whole, loss, gradients, eps=whole.eps, sizes=sizes)


def largest_difference(
    whole: Pass,
    loss: float,
    gradients: Mapping[str, Tensor],
    *,
    eps: float,
    sizes: Mapping[str, float] | None = None,
) -> str | None:
    """Describe the largest difference; return None if there is none beyond rounding.

    Half the digits of the precision have to agree. A tensor's difference is relative to its largest
    entry.
    """
    rough = math.sqrt(eps or torch.finfo(torch.float64).eps)
    if not math.isfinite(loss):
        return f"the loss is {whole.loss:.6g}, which differs ({loss})"
    if not math.isclose(loss, whole.loss, rel_tol=rough, abs_tol=rough * _NOISE):
        return f"the loss is {whole.loss:.6g}, which differs by {abs(loss - whole.loss):.3g}"
    largest = {
        name: max(float(value.abs().max()), (sizes or {}).get(name, 0.0))
        for name, value in whole.gradients.items()
        if value.numel() and value.isfinite().all()
    }
    overall = max(largest.values(), default=0.0)
    worst, said = 1.0, None
    for name, size in largest.items():
        gap = float((whole.gradients[name] - gradients[name]).abs().max())
        excess = gap / (rough * (size + _NOISE * overall)) if gap else 0.0
        if not excess <= worst:
            worst = excess if math.isfinite(excess) else math.inf
            said = f"the gradient of {name!r} differs by {gap / (size or 1.0):.2g} of its size"
    return said


def close(one: Any, other: Any, *, eps: float) -> bool:
    """Return whether two tensors or numbers agree to half the digits."""
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if one.shape != other.shape or one.is_complex() or other.is_complex():
        return torch.equal(one, other)
    rough = math.sqrt(eps or torch.finfo(torch.float64).eps)
    return torch.allclose(one.double(), other.double(), rtol=rough, atol=0, equal_nan=True)
