"""What makes runs repeatable: clocks that tests control, seeds, digests, use of random streams."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ._errors import UsageError


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


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive the seed of one named stream, a 63-bit integer.

    The same names give the same seed on every machine and Python version. Different names give
    unrelated seeds, so which trials run side by side never changes what each of them draws.

    >>> derive_seed(0, "data", 3) == derive_seed(0, "data", 3)
    True
    >>> derive_seed(0, "data", 3) == derive_seed(0, "data", 4)
    False
    """
    text = repr((seed, *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def replica_seed(seed: int, replica: int) -> int:
    """Return the seed with which a replica of a study with this seed is trained.

    Replica 0 has the seed itself, so it is what a study without replicas trains.

    >>> replica_seed(7, 0)
    7
    >>> replica_seed(7, 1) == derive_seed(7, "replica", 1)
    True
    """
    return derive_seed(seed, "replica", replica) if replica else seed


def step_seed(epoch_seed: int, step: int) -> int:
    """Return the seed of one step of an epoch.

    It is derived without hashing, because every step pays for it. An odd multiplier keeps the seeds
    of an epoch distinct and far apart.

    >>> len({step_seed(7, step) for step in range(1000)})
    1000
    """
    return (epoch_seed + step * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF


def fingerprint(value: object) -> str:
    """Return a short, stable digest of a value that JSON can represent.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()


class Streams:
    """Who uses the random streams of a process: one thread at a time.

    Training seeds PyTorch's, NumPy's and Python's streams for each step. Another thread that did
    the same in the meantime would give both of them other numbers.

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
"""Who uses the random streams of this process."""
