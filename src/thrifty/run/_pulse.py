"""Liveness checks of a remote system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """A liveness check that asks in a thread of its own, because an answer may never come.

    It asks every ``every_s`` seconds. ``check`` is quick and never raises. It reports an error
    once there has been no answer for ``patience_s``.
    """

    def __init__(
        self,
        ask: Callable[[], object],
        *,
        every_s: float = 5.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._every_s = every_s
        self._patience_s = patience_s
        self._clock = clock
        self._answered = self._asked = clock()
        self._trouble = "no answer"
        self._asking: threading.Thread | None = None

    def check(self) -> str:
        """Return what is wrong, or an empty text; ask again if it is time."""
        now = self._clock()
        if self._asking is not None and self._asking.is_alive():
            if now - self._asked >= self._patience_s:
                return self._silent(now)
            return ""
        if self._asked - self._answered >= self._patience_s:
            return self._silent(now)
        if now - self._asked >= self._every_s:
            self._asked = now
            self._asking = threading.Thread(target=self._listen, name="pulse", daemon=True)
            self._asking.start()
        return ""

    def _listen(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 (any error means that there was no answer)
            self._trouble = " ".join(str(error).split()) or type(error).__name__
        else:
            self._answered = self._clock()

    def _silent(self, now: float) -> str:
        return f"{self._trouble} for {now - self._answered:.0f} s"
