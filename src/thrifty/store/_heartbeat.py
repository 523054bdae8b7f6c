"""A thread that sends heartbeats while this process trains."""

from __future__ import annotations

import threading
from typing import Self

from thrifty.core import StoreBusyError, StoreError, plain_logger

from ._lease import Lease


logger = plain_logger(__name__)

EVERY_S = 10.0


class Heartbeat:
    """A context manager that sends heartbeats of a lease from a thread of its own.

    An epoch may take longer than other processes wait for a heartbeat.
    """

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
                return  # the next write fails with the same error
            except StoreError as error:
                logger.warning("%s", error)
