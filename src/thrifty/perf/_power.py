"""Power consumption of a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Declared model of a worker's power: one number while waiting, one while training.

    Args:
        idle_w: watts while it waits.
        busy_w: watts while it trains; at least ``idle_w``.

    Raises:
        UsageError: a number is negative or not finite, or ``busy_w`` is below ``idle_w``.

    >>> Power(idle_w=2.0, busy_w=5.0).joules(busy_s=3.0, whole_s=4.0)
    17.0
    """

    idle_w: float
    busy_w: float

    def __post_init__(self) -> None:
        if not 0 <= self.idle_w <= self.busy_w < math.inf:
            raise UsageError(
                f"0 <= idle_w <= busy_w, and both are finite, not idle_w={self.idle_w}, "
                f"busy_w={self.busy_w}"
            )

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy in joules of ``whole_s`` seconds, of which it trains ``busy_s``."""
        return self.idle_w * whole_s + (self.busy_w - self.idle_w) * busy_s
