"""Clocks that are passed as arguments, so that tests can control the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of wall-clock and monotonic time."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch (UTC)."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin; they never run backwards."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch (UTC)."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin; they never run backwards."""
        return time.perf_counter()
