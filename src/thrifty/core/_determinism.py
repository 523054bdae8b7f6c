"""What makes runs repeatable: clocks that tests control, seeds derived by name, stable digests."""

from __future__ import annotations

import hashlib
import json
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
