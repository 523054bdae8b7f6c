"""A thread that says that this process lives, while it trains."""

from __future__ import annotations

import threading
from typing import Self

from thrifty.core import StoreBusyError, StoreError, plain_logger

from ._lease import Lease


logger = plain_logger(__name__)

EVERY_S = 10.0


class Heartbeat:
    """Beats for a lease from a thread of its own, because an epoch may take longer than others wait; a context manager."""

    def __init__(self, lease: Lease, *, every_s: float = EVERY_S) -> None:
        self._lease = lease
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name=f"{lease.study.name}-heartbeat", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._lease.heartbeat()
            except StoreBusyError:
                return  # what is written next is refused, with a word on why
            except StoreError as error:
                logger.warning("%s", error)
