"""Options of training on unequal workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from thrifty.core import HeteroError
from thrifty.perf import BalancerOptions, Power, StepCurve

from ._growth import Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroOptions:
    """Options of a ``HeteroTrainer``; equal on all workers, except ``curve`` and ``power``.

    Args:
        batch_norm: "global": statistics over the global batch, as in one process (layers are
            replaced in place, with the same ``state_dict``). "local": statistics of each worker's
            share, which changes the result.
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
    growth: Growth | None = None
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
