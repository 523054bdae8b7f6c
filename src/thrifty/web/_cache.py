"""Answers that are made once for all readers, and not too often."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Something that was made: from which revision, when, and how long that took."""

    value: Any
    stamp: str | None
    at: float
    cost: float


class Cache:
    """Keeps what was made while its stamp is the present one, and for a little while after.

    Readers of a study that is being trained must not take its processor away. So a thing is made again after
    ``patience_s`` seconds at the soonest, and so rarely that making it takes at most the ``share`` of the time, however
    many ask; those who ask while it is being made wait for it.

    >>> cache = Cache(patience_s=60)
    >>> [cache.get("a", stamp=s, make=lambda: f"made of {s}").value for s in "12"]
    ['made of 1', 'made of 1']
    """

    def __init__(
        self,
        *,
        patience_s: float = 2.0,
        share: float = 0.02,
        size: int = 128,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = patience_s
        self._share = share
        self._size = size
        self._now = now
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, *, stamp: str | None, make: Callable[[], Any]) -> Kept:
        """What is kept under a key, made by ``make`` if it is not there or too old; without a stamp only its age counts."""
        with self._lock:
            found = self._fresh(key, stamp)
            if found is not None:
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                found = self._fresh(key, stamp)  # somebody else was quicker
            if found is not None:
                return found
            return self._make(key, stamp=stamp, make=make)

    def _make(self, key: Hashable, *, stamp: str | None, make: Callable[[], Any]) -> Kept:
        began = self._now()
        try:
            value = make()
        except BaseException:
            with self._lock:
                if key not in self._kept:
                    self._making.pop(key, None)
            raise
        ended = self._now()
        made = Kept(value=value, stamp=stamp, at=ended, cost=ended - began)
        with self._lock:
            self._kept[key] = made
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._making.pop(self._kept.popitem(last=False)[0], None)
        return made

    def _fresh(self, key: Hashable, stamp: str | None) -> Kept | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        wait = max(self._patience, kept.cost / self._share) if self._patience else 0.0
        if (stamp is not None and kept.stamp == stamp) or self._now() - kept.at < wait:
            self._kept.move_to_end(key)
            return kept
        return None


def etag(body: bytes) -> str:
    """A name for a body: equal bodies have equal ones.

    >>> etag(b"a") == etag(b"a"), etag(b"a") == etag(b"b")
    (True, False)
    """
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'
