"""Time as an argument, so that tests can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the time is."""

    def now(self) -> float:
        """Seconds since the epoch (UTC)."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run backwards, from an arbitrary origin."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since the epoch (UTC)."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        return time.perf_counter()
