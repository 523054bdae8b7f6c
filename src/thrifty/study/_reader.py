"""Reading a study's state, and where its results come from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from thrifty.core import StoreUnreachableError, plain_logger
from thrifty.store import Store, StudyInfo
from thrifty.store._address import read_address

from ._ledger import Ledger
from ._repository import StudyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The sources of the epochs that a study's trials have reached, each epoch counted once.

    Attributes:
        trained: Epochs that this run trained.
        evaluated: Epochs that this run did not train: their kept states were evaluated again.
        known: Epochs known before, by the id of the study that trained them (None: deleted study).
    """

    trained: int
    evaluated: int
    known: Mapping[int | None, int]

    @classmethod
    def of(cls, ledger: Ledger) -> Provenance:
        """Count the epochs that the trials of a study have reached."""
        places: set[tuple[int, int]] = set()
        for number in range(len(ledger.history)):
            node = ledger.node_of[number]
            for epoch in range(ledger.history[number].reached, 0, -1):
                place = ledger.plan.owner(node, epoch).id, epoch
                if place in places:
                    break  # all earlier epochs are counted as well
                places.add(place)
        fresh = places - ledger.origins.keys()
        evaluated = len(fresh & ledger.evaluated)
        return cls(
            trained=len(fresh) - evaluated,
            evaluated=evaluated,
            known=Counter(ledger.origins[place] for place in places - fresh),
        )

    def text(self, studies: Mapping[int, StudyInfo], *, own: int) -> str:
        """Return the sources in one line, or an empty string if no trial has reported.

        Args:
            studies: The studies of the database, by id.
            own: The id of this study.
        """
        num_known = sum(self.known.values())
        total = num_known + self.evaluated + self.trained
        if not total:
            return ""
        parts = []
        if num_known:
            parts.append(
                f"{num_known:,} of {total:,} epochs known from {self._from(studies, own)}"
            )
        if self.evaluated:
            of = "" if num_known else f" of {total:,} epochs"
            parts.append(f"{self.evaluated:,}{of} evaluated again with kept states")
        if not self.trained:
            return f"{', '.join(parts)}; nothing to train"
        epochs = "" if parts else " epoch" if total == 1 else " epochs"
        return ", ".join([*parts, f"{self.trained:,}{epochs} trained"])

    def _from(self, studies: Mapping[int, StudyInfo], own: int) -> str:
        first, *rest = sorted(self.known, key=lambda study: -self.known[study])
        info = None if first is None else studies.get(first)
        if info is None:
            name = "a study that was deleted"
        else:
            day = time.strftime("%Y-%m-%d", time.localtime(info.created_at))
            name = f"this study ({day})" if first == own else f"study {info.name!r} ({day})"
        more = (
            ""
            if not rest
            else " and another one"
            if len(rest) == 1
            else f" and {len(rest)} others"
        )
        return name + more


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
        if self._ledger is not None and (self._is_running or is_in_memory(archive)):
            return self._ledger
        try:
            with archive.open(create=False) as store:
                return self.read(archive, store)
        except StoreUnreachableError as error:
            if self._ledger is None:
                raise
            logger.warning("%s; this is what was read of the study before", error)
            return self._ledger

    def state(self, archive: StudyRepository) -> tuple[str, Ledger]:
        """Return the study's state as in ``StudySummary``, and its ledger.

        The state is "" for a study in memory.

        Raises:
            StudyNotFoundError: The study does not exist.
            StudyMismatchError: The database has a different study of this name.
            StoreUnreachableError: The database does not answer, and nothing was read before.
        """
        if self._ledger is not None and self._is_running:
            return "running", self._ledger
        if is_in_memory(archive):
            return "", self.current(archive)
        try:
            with archive.open(create=False) as store:
                archive.find(store)
                state = store.studies.summary(archive.name).state
                return state, self.read(archive, store)
        except StoreUnreachableError:
            if self._ledger is None:
                raise
            return "unknown; its database does not answer", self._ledger

    def read(self, archive: StudyRepository, store: Store) -> Ledger:
        """Return the ledger of a study that this process is not running."""
        mark = store.studies.mark(archive.name)
        if self._ledger is None or mark is None or mark != self._mark:
            self._ledger = archive.load(store, store.studies.get(archive.name))
            self._mark = mark
        return self._ledger

    def finished(
        self, archive: StudyRepository, store: Store, info: StudyInfo
    ) -> Ledger | None:
        """Return the ledger of a study that has nothing left to try, or None."""
        if info.state != "done":
            return None
        ledger = self.read(archive, store)
        return None if ledger.history.enqueued else ledger

    @contextmanager
    def running(
        self, archive: StudyRepository, store: Store, info: StudyInfo
    ) -> Iterator[Ledger]:
        """Provide the ledger with which this process runs the study in this context."""
        self._ledger, self._mark = archive.load(store, info), None
        self._is_running = True
        try:
            yield self._ledger
            self._ledger.count_as_known()
            if not archive.storage.is_shared:
                self._mark = store.studies.mark(archive.name)
        finally:
            self._is_running = False


def is_in_memory(archive: StudyRepository) -> bool:
    """Return whether the database is in memory and vanishes when the run ends.

    Raises:
        UsageError: The storage is not a database address.
    """
    url = read_address(archive.storage.url)
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")
