"""One thread of a process at a time may use its global random streams.

Training seeds PyTorch's, NumPy's and Python's streams for each step. Another thread that does the
same in the meantime would give both of them other numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ._errors import UsageError


class Streams:
    """Who uses the random streams of a process.

    >>> streams = Streams()
    >>> with streams.used("a study"), streams.used("another one in the same thread"):
    ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None
        self._holds: list[tuple[str, bool]] = []

    def take(self, what: str, *, is_short: bool = False) -> None:
        """Take the streams for this thread, as often as it likes; ``give_back`` ends each time.

        Waits for a thread that needs them for a short time only.

        Args:
            what: Who takes them, in words.
            is_short: Whether they are given back soon.

        Raises:
            UsageError: Another thread has them for as long as it trains.
        """
        here = threading.current_thread()
        with self._changed:
            while (other := self._holder) is not None and other is not here and other.is_alive():
                if not all(short for _, short in self._holds):
                    raise UsageError(
                        f"{what} cannot begin in this thread while {self._holds[0][0]} trains in "
                        f"another one ({other.name}): they would draw from the same random "
                        "streams; run one after the other, give both of them workers of their own "
                        "(executor=th.Local(workers=2)), or start two processes"
                    )
                self._changed.wait(_LOOK_AGAIN_S)  # a thread may end without giving them back
            if self._holder is not here:
                self._holder, self._holds = here, []
            self._holds.append((what, is_short))

    def give_back(self) -> None:
        """End what ``take`` began last in this thread."""
        with self._changed:
            if self._holds:
                self._holds.pop()
            if not self._holds:
                self._holder = None
                self._changed.notify_all()

    @contextmanager
    def used(self, what: str) -> Iterator[None]:
        """Have the streams for a short time, within the context.

        Raises:
            UsageError: As ``take``.
        """
        self.take(what, is_short=True)
        try:
            yield
        finally:
            self.give_back()


_LOOK_AGAIN_S = 1.0

STREAMS = Streams()
"""Those of this process."""
