"""The time an epoch took, and the time it would have taken alone."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import EpochDone
from thrifty.store import EpochRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTimes:
    """Seconds of one epoch, or of several.

    Attributes:
        seconds: Seconds that were spent, including checks.
        checks: The part of ``seconds`` that went into checks.
        alone: Seconds that training alone would have taken; None if a part was not measured.
        alone_low: Low end of ``alone``.
        alone_high: High end of ``alone``.
        packed: The number of epochs that were trained in a pack with others.
    """

    seconds: float = 0.0
    checks: float = 0.0
    alone: float | None = 0.0
    alone_low: float = 0.0
    alone_high: float = 0.0
    packed: int = 0

    @classmethod
    def of(cls, epoch: EpochDone | EpochRecord) -> EpochTimes:
        """Return the times of an epoch that has ended."""
        alone, low, high = (
            epoch.seconds_alone,
            epoch.seconds_alone_low,
            epoch.seconds_alone_high,
        )
        return cls(
            seconds=epoch.seconds,
            checks=epoch.seconds_checks,
            alone=alone,
            alone_low=(alone or 0.0) if low is None else low,
            alone_high=(alone or 0.0) if high is None else high,
            # The time of an epoch that was trained alone has no range: it was measured itself.
            packed=alone is None or low is not None,
        )

    @classmethod
    def of_again(cls, epoch: EpochRecord) -> EpochTimes:
        """Return the total time of all repeated trainings of an epoch."""
        low, high = epoch.again_alone_low_s, epoch.again_alone_high_s
        is_known = low is not None and high is not None
        return cls(
            seconds=epoch.again_s,
            checks=epoch.again_checks_s,
            alone=epoch.again_alone_s if is_known else None,
            alone_low=low or 0.0,
            alone_high=high or 0.0,
            packed=not is_known or low != high,
        )

    def plus(self, other: EpochTimes) -> EpochTimes:
        """Return the sum; the low end of a sum is the sum of the low ends."""
        is_known = self.alone is not None and other.alone is not None
        return EpochTimes(
            seconds=self.seconds + other.seconds,
            checks=self.checks + other.checks,
            alone=(self.alone or 0.0) + (other.alone or 0.0) if is_known else None,
            alone_low=self.alone_low + other.alone_low,
            alone_high=self.alone_high + other.alone_high,
            packed=self.packed + other.packed,
        )
