"""When open pages ask again: the more there are, the later each, so that all together cost no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Gives appointments: each page that asks is told when to come back, no two within ``spacing_s``.

    A round of a page costs the server some milliseconds of a processor that training may want. One page comes back after
    ``least_s`` seconds, two hundred in turns.

    >>> pace = Pace(least_s=2, spacing_s=0.5, now=lambda: 0.0)
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
        """In how many seconds the page that asks now shall ask again."""
        with self._lock:
            now = self._now()
            self._last = max(now + self._least, self._last + self._spacing)
            return self._last - now
