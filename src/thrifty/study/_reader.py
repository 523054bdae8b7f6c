"""The ledger behind a study object, as recent as the database or more recent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import make_url

from thrifty.core import StoreUnreachableError, plain_logger
from thrifty.store import Store, StudyInfo

from ._ledger import Ledger
from ._repository import StudyRepository


logger = plain_logger(__name__)


class Reader:
    """A cache of a study's ledger, which is read again when the database has changed.

    While this process runs the study, its own ledger is ahead of the database.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._mark: Any = None
        """State of the database when the ledger was read (None: unknown)."""
        self._is_running = False

    def current(self, archive: StudyRepository) -> Ledger:
        """Return the current ledger.

        Raises:
            StudyNotFoundError: The study does not exist.
        """
        if self._ledger is not None and (self._is_running or _is_in_memory(archive)):
            return self._ledger
        try:
            with archive.open(create=False) as store:
                return self.read(archive, store)
        except StoreUnreachableError as error:
            if self._ledger is None:
                raise
            logger.warning("%s; this is what was read of the study before", error)
            return self._ledger

    def read(self, archive: StudyRepository, store: Store) -> Ledger:
        """Return the ledger of a study that this process is not running."""
        mark = store.studies.mark(archive.name)
        if self._ledger is None or mark is None or mark != self._mark:
            self._ledger = archive.load(store, store.studies.get(archive.name))
            self._mark = mark
        return self._ledger

    @contextmanager
    def running(
        self, archive: StudyRepository, store: Store, info: StudyInfo
    ) -> Iterator[Ledger]:
        """Provide the ledger with which this process runs the study in this context."""
        self._ledger, self._mark = archive.load(store, info), None
        self._is_running = True
        try:
            yield self._ledger
            if not archive.storage.is_shared:
                self._mark = store.studies.mark(archive.name)
        finally:
            self._is_running = False


def _is_in_memory(archive: StudyRepository) -> bool:
    """Return whether the database is in memory and vanishes when the run ends."""
    url = make_url(archive.storage.url)
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")
