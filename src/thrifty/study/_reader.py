"""What a study object knows of its study: never less than the database does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import make_url

from thrifty.core import StoreUnreachableError, plain_logger
from thrifty.store import Store, StudyInfo

from ._archive import Archive
from ._ledger import Ledger


logger = plain_logger(__name__)


class Reader:
    """Keeps the ledger of a study, and reads it again when the database has changed.

    While this process runs the study, its own ledger is ahead of the database.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._mark: Any = None
        """How the database stood when the ledger was read; None: not known."""
        self._is_running = False

    def current(self, archive: Archive) -> Ledger:
        """The ledger as it is now.

        Raises:
            StudyNotFoundError: There is no such study.
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

    def read(self, archive: Archive, store: Store) -> Ledger:
        """The ledger of a study that is not running here."""
        mark = store.studies.mark(archive.name)
        if self._ledger is None or mark is None or mark != self._mark:
            self._ledger = archive.load(store, store.studies.get(archive.name))
            self._mark = mark
        return self._ledger

    @contextmanager
    def running(self, archive: Archive, store: Store, info: StudyInfo) -> Iterator[Ledger]:
        """Within, this process runs the study with the ledger that it gets."""
        self._ledger, self._mark = archive.load(store, info), None
        self._is_running = True
        try:
            yield self._ledger
            if not archive.storage.is_shared:
                self._mark = store.studies.mark(archive.name)
        finally:
            self._is_running = False


def _is_in_memory(archive: Archive) -> bool:
    """Whether the database is in this process and was gone when the run had ended."""
    url = make_url(archive.storage.url)
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")
