"""Faults of simulated workers: failures, preemptions and stragglers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from thrifty.core import UsageError, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often simulated workers fail, are preempted or are slow; by default never.

    Each worker has random streams of its own, so adding workers changes nothing for the others.

    Attributes:
        mean_between_failures_s: Mean seconds between failures of one worker, exponentially
            distributed. A failed worker loses its training since the last checkpoint.
        repair_s: Seconds until a failed worker is available again.
        mean_between_preemptions_s: Mean seconds between preemptions of one worker, as on spot
            machines, exponentially distributed.
        notice_s: Seconds between the notice of a preemption and the preemption itself. If an epoch
            ends in that time, its state is saved.
        replace_s: Seconds until another machine replaces a preempted one.
        stragglers: Fraction of the workers that are always slow.
        slowdown: Factor by which an epoch takes longer on those.

    >>> Faults(mean_between_failures_s=86_400, stragglers=0.05).slowdown
    2.0

    Raises:
        UsageError: A time, the fraction or the factor is out of range.
    """

    mean_between_failures_s: float = math.inf
    repair_s: float = 0.0
    mean_between_preemptions_s: float = math.inf
    notice_s: float = 0.0
    replace_s: float = 0.0
    stragglers: float = 0.0
    slowdown: float = 2.0

    def __post_init__(self) -> None:
        for name in ("mean_between_failures_s", "mean_between_preemptions_s"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"Faults({name}={getattr(self, name)!r}): it must be above 0 (math.inf: never)"
                )
        for name in ("repair_s", "notice_s", "replace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"Faults({name}={getattr(self, name)!r}): it must be a finite number of "
                    "seconds, 0 or more"
                )
        if not 0 <= self.stragglers <= 1:
            raise UsageError(
                f"Faults(stragglers={self.stragglers!r}): it is a share of the workers, from 0 to 1"
            )
        if not 1 <= self.slowdown < math.inf:
            raise UsageError(
                f"Faults(slowdown={self.slowdown!r}): an epoch takes so many times as long; "
                "use 1 or more"
            )

    def slowdowns(self, workers: int, *, seed: int) -> list[float]:
        """Return the factor by which an epoch takes longer on each worker; 1.0 if it is not slow.

        >>> Faults(stragglers=0.5, slowdown=3).slowdowns(6, seed=0).count(3.0) in range(7)
        True
        """
        if not self.stragglers:
            return [1.0] * workers
        draws = np.random.default_rng(derive_seed(seed, "stragglers")).random(workers)
        return [float(self.slowdown) if draw < self.stragglers else 1.0 for draw in draws]


class Times:
    """Times of random events of one worker, with exponential gaps from a stream of its own."""

    __slots__ = ("_mean_s", "_rng")

    def __init__(self, mean_s: float, *, seed: int) -> None:
        self._mean_s = mean_s
        # Most simulations have thousands of workers and no such events, so make no generator.
        self._rng = None if math.isinf(mean_s) else np.random.default_rng(seed)

    def gap_s(self) -> float:
        """Draw the seconds from now until the next event (``math.inf``: never)."""
        return (
            math.inf if self._rng is None else self._mean_s * self._rng.standard_exponential()
        )
