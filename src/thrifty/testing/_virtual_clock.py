"""A clock that only a test advances."""

from __future__ import annotations


class VirtualClock:
    """A clock that shows the time that a test sets.

    >>> clock = VirtualClock(100.0)
    >>> clock.advance(5.0)
    >>> clock.now(), clock.monotonic()
    (105.0, 5.0)
    >>> clock.jump(-50.0)
    >>> clock.now(), clock.monotonic()
    (55.0, 5.0)
    """

    def __init__(self, now: float = 0.0) -> None:
        self._began = now
        self._now = now

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since the clock was made."""
        return self._now - self._began

    def jump(self, seconds: float) -> None:
        """Set the date, as an administrator or a time server does; no time passes."""
        self._now += seconds
        self._began += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
