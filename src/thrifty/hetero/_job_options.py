"""Options of uneven data parallelism, and batches that grow with the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from thrifty.core import HeteroError
from thrifty.perf import BalancerOptions, Power, StepCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScaling:
    """Gives every worker its most efficient batch, and scales the learning rate.

    As in Stannis, section 3, the slowest worker gets the smallest batch at which it reaches
    ``efficiency`` of its best speed. The others get as much as they can train in the same time. The
    result is then no longer that of one process with the requested batch: it is a different run
    with more samples per step, and is reported as such.

    Args:
        rule: How the learning rate grows with the batch: "linear", "sqrt" or "none".
        warmup_steps: Steps over which the learning rate grows.
        efficiency: Share of the slowest worker's best speed, between 0 and 1.
        max_batch: Maximum number of samples of the global batch.

    Raises:
        HeteroError: An option is out of its range.

    >>> growth = BatchScaling(warmup_steps=10)
    >>> growth.factor(batch=512, base=128, step=5), growth.factor(batch=512, base=128, step=50)
    (2.5, 4.0)
    """

    rule: Literal["linear", "sqrt", "none"] = "linear"
    warmup_steps: int = 0
    efficiency: float = 0.9
    max_batch: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in {"linear", "sqrt", "none"}:
            raise HeteroError(f"rule is 'linear', 'sqrt' or 'none', not {self.rule!r}")
        if not 0 < self.efficiency < 1:
            raise HeteroError(f"efficiency is between 0 and 1, not {self.efficiency}")
        if self.warmup_steps < 0 or (self.max_batch is not None and self.max_batch < 1):
            raise HeteroError("warmup_steps is not negative, and max_batch is at least 1")

    def batch(self, curves: Sequence[StepCurve], base: int) -> int:
        """Return the global batch for these workers, at least ``base``.

        >>> BatchScaling().batch([StepCurve(fixed_s=0.1, sample_s=0.01)] * 2, 64)
        180
        """
        share = self.efficiency / (1 - self.efficiency)
        knees = [
            max(1, math.ceil(share * curve.fixed_s / curve.sample_s - 1e-9)) for curve in curves
        ]
        max_batch = self.max_batch or 2**20
        end = max(
            curve.seconds(curve.capacity(curve.seconds(knee), max_batch))
            for curve, knee in zip(curves, knees, strict=True)
        )
        return max(
            base, min(max_batch, sum(curve.capacity(end, max_batch) for curve in curves))
        )

    def factor(self, *, batch: int, base: int, step: int) -> float:
        """Return the factor by which the learning rate is multiplied."""
        if self.rule == "none":
            return 1.0
        whole = batch / base if self.rule == "linear" else math.sqrt(batch / base)
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return 1.0 + (whole - 1.0) * warm


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroOptions:
    """Options of a ``HeteroTrainer``; equal on all workers, except ``curve`` and ``power``.

    Args:
        batch_norm: "global": statistics over the global batch, as in one process (layers change
            their class, with the same ``state_dict``; layers with a ``forward`` of their own are
            refused). "local": statistics of each worker's share, which changes the result.
        clip_norm: Norm to clip the gradient of the global batch to; None: no clipping.
        objective: "throughput", or "energy" for the fewest joules per step (needs ``power``).
        power: Power model of this worker.
        growth: Lets the global batch and the learning rate grow with the workers; None: the batch
            is fixed.
        subsample: Leave out private samples beyond a worker's share of the epoch.
        balancing: When the split follows the workers' speed.
        curve: Speed curve of this worker (default: measured).
        bucket_cap_mb: MiB of a gradient bucket (the first one: 1 MiB). Buckets are summed while the
            backward pass continues. None: all gradients are summed at once, after it.
        admit_every: Steps between two polls for new workers.
        verify: Check while training that the gradient is that of one process. False: each worker
            trains its share with its own loss unchecked, which may change the result.

    Raises:
        HeteroError: An option is invalid.

    >>> HeteroOptions(clip_norm=1.0).batch_norm
    'global'
    """

    batch_norm: Literal["global", "local"] = "global"
    clip_norm: float | None = None
    objective: Literal["throughput", "energy"] = "throughput"
    power: Power | None = None
    growth: BatchScaling | None = None
    subsample: bool = False
    balancing: BalancerOptions = field(default_factory=BalancerOptions)
    curve: StepCurve | None = None
    bucket_cap_mb: float | None = 25.0
    admit_every: int = 10
    verify: bool = True

    def __post_init__(self) -> None:
        if self.batch_norm not in {"global", "local"}:
            raise HeteroError(f"batch_norm is 'global' or 'local', not {self.batch_norm!r}")
        if self.objective not in {"throughput", "energy"}:
            raise HeteroError(f"objective is 'throughput' or 'energy', not {self.objective!r}")
        if self.objective == "energy" and self.power is None:
            raise HeteroError(
                "objective='energy' needs power=Power(idle_w=..., busy_w=...) of this worker"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise HeteroError(f"clip_norm is positive, not {self.clip_norm}")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise HeteroError(f"bucket_cap_mb is positive, not {self.bucket_cap_mb}")
        if self.admit_every < 1:
            raise HeteroError(f"admit_every is at least 1, not {self.admit_every}")
