"""The store: one database for many studies, its checkpoint folder, and what all studies share."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, select

from thrifty.core import Clock, SystemClock

from . import _schema as schema
from ._address import read_address
from ._checkpoints import CheckpointFolder
from ._driver import Driver
from ._engine import open_engine, user_errors
from ._leftovers import Leftovers, remove_leftovers
from ._plans import Plans
from ._records import Record, StudyInfo
from ._studies import Studies
from ._writer import keep_last, write
from .coordination._leases import Lease


class Curves:
    """Pack curves as plain data, by a key that identifies everything they depend on."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def get(self, key: str) -> list[dict[str, Any]] | None:
        """Return the curves of a key; None if they are missing or damaged and must be measured."""
        query = select(schema.curves.c.curves).where(schema.curves.c.key == key)
        with user_errors(self._engine), self._engine.connect() as connection:
            try:
                found = connection.execute(query).scalar()
            except ValueError:
                return None
        if isinstance(found, list) and all(isinstance(curve, dict) for curve in found):
            return found
        return None

    def all(self) -> dict[str, list[dict[str, Any]]]:
        """Return all undamaged curves, by key."""
        query = select(schema.curves.c.key)
        with user_errors(self._engine), self._engine.connect() as connection:
            keys = connection.execute(query).scalars().all()
        return {key: curves for key in keys if (curves := self.get(key)) is not None}

    def put(
        self, key: str, *, device: str, structure: str, curves: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store curves under a key, and replace older ones.

        ``device`` and ``structure`` describe for people what was measured.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        row = {
            "key": key,
            "device": device,
            "structure": structure,
            "curves": [dict(curve) for curve in curves],
            "created_at": self._clock.now(),
        }
        with user_errors(self._engine), self._engine.begin() as connection:
            keep_last(connection, schema.curves, [row])


class Store:
    """A database of studies and plans; other processes may read it while a study runs.

    >>> with Store.open("sqlite://") as store:
    ...     plan = store.plans.open("what is trained", task="Digits")
    ...     study = store.studies.create("first", plan=plan.id, spec={"mode": "max"})
    ...     [s.name for s in store.studies.list()]
    ['first']
    """

    def __init__(self, engine: Engine, *, checkpoints: str, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self.plans = Plans(engine, clock)
        self.studies = Studies(engine, clock)
        self.curves = Curves(engine, clock)
        self.checkpoints = CheckpointFolder(checkpoints)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        checkpoints: str | None = None,
        clock: Clock | None = None,
        create: bool = True,
    ) -> Store:
        """Open a database; create or migrate it if needed.

        ``checkpoints`` is a folder or an fsspec address; the default is a folder beside the SQLite
        file.

        Raises:
            UsageError: ``url`` is not a database address.
            StudyNotFoundError: There is no such file and ``create`` is False.
            StoreVersionError: A newer thrifty wrote the database.
            StoreWriteError: The database cannot be created or migrated.
            StoreUnreachableError: The database server does not answer.
        """
        engine = open_engine(url, create=create)
        return cls(
            engine,
            checkpoints=checkpoints or default_checkpoints(url),
            clock=clock or SystemClock(),
        )

    def record(self, records: Sequence[Record]) -> None:
        """Write a batch of records durably: all of them or none.

        Recording an epoch, a node or a checkpoint again does no harm, so a batch may be repeated.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        if not records:
            return
        with user_errors(self._engine), self._engine.begin() as connection:
            write(connection, records, at=self._clock.now())

    def lease(self, study: StudyInfo, *, shared: bool = False) -> Lease:
        """Return a lease by which this process holds a study.

        Args:
            study: The study to run.
            shared: Whether other processes may run other studies of its plan at the same time.

        Raises:
            StoreBusyError: Another live process holds the study; or it holds the plan, and one of
                the two processes does not share it.
            StudyNotFoundError: Another process has deleted the study.
        """
        return Lease(self._engine, study, shared=shared, clock=self._clock)

    def drive(self, lease: Lease, *, revision: int = 0) -> Driver:
        """Return the driver that writes the records of a leased study.

        Args:
            lease: The lease of the study.
            revision: The revision of the plan up to which the caller knows everything.
        """
        return Driver(self._engine, lease, clock=self._clock, revision=revision)

    def remove_leftovers(self, lease: Lease, *, folder: str) -> Leftovers:
        """Delete the files that killed runs of a plan have left in its folder, where that is safe.

        Args:
            lease: This process's lease of a study of the plan; the study must not be training yet.
            folder: The plan's folder within the checkpoint folder.
        """
        return remove_leftovers(
            self._engine, self.checkpoints, lease, folder=folder, now=self._clock.now()
        )

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def default_checkpoints(url: str) -> str:
    """Return the default checkpoint folder of a database."""
    address = read_address(url)
    if address.get_backend_name() != "sqlite":
        return "thrifty-checkpoints"
    if address.database in (None, "", ":memory:"):
        return tempfile.mkdtemp(prefix="thrifty-")
    path = Path(str(address.database)).resolve()
    return str(path.with_name(f"{path.stem}-checkpoints"))
