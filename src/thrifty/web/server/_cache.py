"""A cache of responses that are made once for all readers, and not too often."""

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
    """A cached value with its revision, its time, and the seconds that it took to make.

    Attributes:
        value: The value.
        stamp: Revision from which it was made.
        at: Time at which it was made.
        cost: Seconds that making it took.
    """

    value: Any
    stamp: str | None
    at: float
    cost: float


class Cache:
    """Caches values while their stamp is current, and for a short time after.

    Readers of a running study must not take its CPU time. A value is therefore made again after
    ``patience_s`` seconds at the earliest, and so rarely that making it takes at most ``share`` of
    the time, independent of the number of readers. Readers that ask while a value is being made
    wait for it.

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
        """Return the cached value of a key; call ``make`` if it is missing or too old.

        Without a stamp only the age counts.
        """
        with self._lock:
            found = self._fresh(key, stamp)
            if found is not None:
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                found = self._fresh(key, stamp)  # another thread may have made it
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
    """Return the ETag of a body: equal bodies have equal tags.

    >>> etag(b"a") == etag(b"a"), etag(b"a") == etag(b"b")
    (True, False)
    """
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'
