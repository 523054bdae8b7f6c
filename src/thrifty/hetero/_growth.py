"""Global batches that grow with the workers, and learning rates that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thrifty.core import HeteroError
from thrifty.perf import StepCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Gives every worker its most efficient batch, and scales the learning rate.

    As in Stannis, section 3, the slowest worker gets the smallest batch at which it reaches
    ``efficiency`` of its best speed. The others get as much as they can train in the same time. The
    result is then no longer that of one process with the requested batch: it is a different run
    with more samples per step, and is reported as such.

    Args:
        rule: How the learning rate grows with the batch: "linear", "sqrt" or "none".
        warmup_steps: Steps over which the learning rate grows.
        efficiency: Share of the slowest worker's best speed, between 0 and 1.
        most: Maximum number of samples of the global batch.

    Raises:
        HeteroError: An option is out of its range.

    >>> growth = Growth(warmup_steps=10)
    >>> growth.factor(batch=512, base=128, step=5), growth.factor(batch=512, base=128, step=50)
    (2.5, 4.0)
    """

    rule: Literal["linear", "sqrt", "none"] = "linear"
    warmup_steps: int = 0
    efficiency: float = 0.9
    most: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in {"linear", "sqrt", "none"}:
            raise HeteroError(f"rule is 'linear', 'sqrt' or 'none', not {self.rule!r}")
        if not 0 < self.efficiency < 1:
            raise HeteroError(f"efficiency is between 0 and 1, not {self.efficiency}")
        if self.warmup_steps < 0 or (self.most is not None and self.most < 1):
            raise HeteroError("warmup_steps is not negative, and most is at least 1")

    def batch(self, curves: Sequence[StepCurve], base: int) -> int:
        """Return the global batch for these workers, at least ``base``.

        >>> Growth().batch([StepCurve(fixed_s=0.1, sample_s=0.01)] * 2, 64)
        180
        """
        share = self.efficiency / (1 - self.efficiency)
        knees = [
            max(1, math.ceil(share * curve.fixed_s / curve.sample_s - 1e-9)) for curve in curves
        ]
        most = self.most or 2**20
        end = max(
            curve.seconds(curve.capacity(curve.seconds(knee), most))
            for curve, knee in zip(curves, knees, strict=True)
        )
        return max(base, min(most, sum(curve.capacity(end, most) for curve in curves)))

    def factor(self, *, batch: int, base: int, step: int) -> float:
        """Return the factor by which the learning rate is multiplied."""
        if self.rule == "none":
            return 1.0
        whole = batch / base if self.rule == "linear" else math.sqrt(batch / base)
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return 1.0 + (whole - 1.0) * warm
