"""The store: one database for many studies, and the folder of their checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from sqlalchemy import Engine

from thrifty.core import Clock, SystemClock

from ._address import read_address
from ._checkpoints import CheckpointFolder
from ._curves import Curves
from ._driver import Driver
from ._engine import open_engine, user_errors
from ._lease import Lease
from ._leftovers import Leftovers, remove_leftovers
from ._plans import Plans
from ._records import Record, StudyInfo
from ._studies import Studies
from ._writer import write


class Store:
    """Records of studies and plans; other processes may read them while a study runs.

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
        """Opens a database, made or brought up to date if need be.

        ``checkpoints`` is a folder or an fsspec address; by default it lies beside a SQLite file.

        Raises:
            UsageError: ``url`` is not a database address.
            StudyNotFoundError: there is no such file and ``create`` is False.
            StoreVersionError: a newer thrifty wrote it.
            StoreWriteError: it cannot be written.
            StoreUnreachableError: its server does not answer.
        """
        engine = open_engine(url, create=create)
        return cls(
            engine,
            checkpoints=checkpoints or default_checkpoints(url),
            clock=clock or SystemClock(),
        )

    def record(self, records: Sequence[Record]) -> None:
        """Writes a batch of records: all of them, durably, or none.

        Recording an epoch, a node or a checkpoint again changes nothing for the worse, so a batch may be repeated.

        Raises:
            StoreWriteError: full disk, read-only place.
        """
        if not records:
            return
        with user_errors(self._engine), self._engine.begin() as connection:
            write(connection, records, at=self._clock.now())

    def lease(self, study: StudyInfo, *, shared: bool = False) -> Lease:
        """Holds a study for this process.

        Args:
            study: that is to be run.
            shared: whether other processes may run other studies of its plan at the same time.

        Raises:
            StoreBusyError: another living process holds the study, or its plan, and one of both does not share it.
        """
        return Lease(self._engine, study, shared=shared, clock=self._clock)

    def drive(self, lease: Lease, *, revision: int = 0) -> Driver:
        """What runs a study that is held.

        Args:
            lease: the study.
            revision: of its plan, up to which all is known.
        """
        return Driver(self._engine, lease, clock=self._clock, revision=revision)

    def remove_leftovers(self, lease: Lease, *, folder: str) -> Leftovers:
        """Remove the files that killed runs of a plan have left in its folder, where that is safe.

        Args:
            lease: A study of the plan, held by this process; nothing of it may be training yet.
            folder: The folder of the plan, below that of all checkpoints.
        """
        return remove_leftovers(
            self._engine, self.checkpoints, lease, folder=folder, now=self._clock.now()
        )

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def default_checkpoints(url: str) -> str:
    """Return where checkpoints of a database go unless somebody says otherwise."""
    address = read_address(url)
    if address.get_backend_name() != "sqlite":
        return "thrifty-checkpoints"
    if address.database in (None, "", ":memory:"):
        return tempfile.mkdtemp(prefix="thrifty-")
    path = Path(str(address.database)).resolve()
    return str(path.with_name(f"{path.stem}-checkpoints"))
