"""Polling intervals of open pages: they grow with the number of pages, to limit the total cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class PollThrottle:
    """Staggers polling: each page is told when to poll again, no two within ``spacing_s``.

    A poll costs the server some milliseconds of CPU time that training may need. A single page
    polls again after ``least_s`` seconds; two hundred pages take turns.

    >>> pace = PollThrottle(least_s=2, spacing_s=0.5, now=lambda: 0.0)
    >>> [pace.again_s() for _ in range(3)]
    [2.0, 2.5, 3.0]
    """

    def __init__(
        self,
        *,
        least_s: float = 2.0,
        spacing_s: float = 0.1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least = least_s
        self._spacing = spacing_s
        self._now = now
        self._last = -least_s
        self._lock = threading.Lock()

    def again_s(self) -> float:
        """Return in how many seconds the current client should poll again."""
        with self._lock:
            now = self._now()
            self._last = max(now + self._least, self._last + self._spacing)
            return self._last - now
