"""The store: one database for many studies, its checkpoint folder, and a driver's access to it."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, Exists, exists, func, select, update

from thrifty.core import (
    Clock,
    StoreBusyError,
    StoreUnreachableError,
    SystemClock,
    UsageError,
    plain_logger,
)
from thrifty.plan import Stage

from . import _schema as schema
from ._acts import Act, Acts, queued
from ._address import read_address
from ._checkpoints import CheckpointFolder, Leftovers, remove_leftovers
from ._coordination import (
    Lease,
    check_exists,
    claim,
    claims_of_others,
    lock_plan,
    next_revision,
    release,
    spans_of,
    taken_over,
)
from ._engine import fetch, open_engine, user_errors
from ._plans import Plans, news_of
from ._records import Changes, LinesLogged, NodeRecord, Record, StudyInfo
from ._studies import Studies, enqueued_since
from ._trash import KEPT_S, Garbage, Trash, collect
from ._trial_lines import LogLines
from ._writer import keep_last, write


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
        keys = [row.key for row in fetch(self._engine, query)]
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
        self.acts = Acts(engine, clock)
        self.log_lines = LogLines(engine)
        self.trash = Trash(engine, clock)
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
            UsageError: ``url`` is not a database address, or ``checkpoints`` no folder.
            StudyNotFoundError: There is no such file and ``create`` is False.
            StoreVersionError: A newer thrifty wrote the database.
            StoreWriteError: The database cannot be created or migrated.
            StoreUnreachableError: The database server does not answer.
        """
        engine = open_engine(url, create=create)
        place = checkpoints or default_checkpoints(url)
        try:
            return cls(engine, checkpoints=place, clock=clock or SystemClock())
        except UsageError:
            engine.dispose()
            raise

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
            self._engine,
            self.checkpoints,
            plan=lease.study.plan,
            is_alone=lease.is_alone,
            folder=folder,
            now=self._clock.now(),
        )

    def collect_garbage(self, *, older_than_s: float = KEPT_S, dry_run: bool = False) -> Garbage:
        """Remove deleted studies for good, and the states that no study needs any more.

        Args:
            older_than_s: Seconds since its deletion, after which a study cannot be restored.
            dry_run: Whether to remove nothing, and only to say what would be removed.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        return collect(
            self._engine, self.checkpoints, self._clock, older_than_s=older_than_s, dry_run=dry_run
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
        return _folder_until_exit()
    path = Path(str(address.database)).resolve()
    return str(path.with_name(f"{path.stem}-checkpoints"))


def _folder_until_exit() -> str:
    """Create a folder that is removed when this process ends."""
    folder, owner = tempfile.mkdtemp(prefix="thrifty-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a process that was forked from it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


logger = plain_logger(__name__)

PATIENCE_S = 300.0
"""How long to retry a database that does not answer before the study fails."""
LOOK_S = 5.0
"""Seconds between releases of the claims of dead drivers."""

LINES_PAUSE_S = 60.0
"""Seconds without log lines after they could not be written."""

_Answer = TypeVar("_Answer")


class Driver:
    """The writer of a study's records, each exactly once; it coordinates with other drivers.

    If the database does not answer, the driver retries for ``PATIENCE_S`` and then raises
    StoreUnreachableError. Records written before that are safe, and a later run can write the
    others.

    Args:
        engine: The database.
        lease: The lease of the study that is run.
        clock: The source of time.
        revision: The revision of the plan up to which the caller knows everything.
    """

    def __init__(self, engine: Engine, lease: Lease, *, clock: Clock, revision: int) -> None:
        self.shared = lease.shared
        self._engine = engine
        self._lease = lease
        self._clock = clock
        self._sleep = time.sleep
        self._plan = lease.study.plan
        self._seen = revision
        self._held = Counter[int]()
        """Number of running chains on each node; one may continue where another has left off."""
        self._done: set[int] = set()
        """Nodes that are still claimed although their chains have ended."""
        self._looked = clock.monotonic()
        self._lines = LogLines(engine)
        self._lines_from = -math.inf
        """When lines are written again after that has failed, on a monotonic clock."""
        self._batch = self._again(self._last_batch)

    def record(self, records: Sequence[Record]) -> None:
        """Write a whole batch durably and exactly once, even if the connection breaks.

        Raises:
            StoreBusyError: Another process has taken over the study.
            StudyNotFoundError: Another process has deleted the study.
            StoreWriteError: The disk is full, or the place is read-only.
            StoreUnreachableError: The database has not answered for ``PATIENCE_S``.
        """
        if not records and not self._done:
            return
        self._write_lines(records)

        def attempt() -> None:
            with user_errors(self._engine), self._engine.begin() as connection:
                seen = self._write(connection, records)
            self._seen = seen

        self._again(attempt)
        self._batch += 1
        self._done.clear()

    def extend(self, add: Callable[[Changes], Sequence[Record]], *, num_nodes: int) -> None:
        """Add nodes to the plan while no other driver can.

        Args:
            add: A function that gets the changes by other drivers and returns the records to
                write. It is called once.
            num_nodes: The number of nodes that the caller knows.

        Raises:
            StoreBusyError: The connection broke during the write and other drivers have added
                nodes since, or another process has taken over the study.
            StoreWriteError: As in ``record``.
            StoreUnreachableError: As in ``record``.
        """
        pending: Sequence[Record] | None = None

        def attempt() -> None:
            nonlocal pending
            with user_errors(self._engine), self._engine.begin() as connection:
                lock_plan(connection, self._plan)
                if pending is None:
                    changes = self._read(connection, num_nodes=num_nodes)
                    pending = add(changes)
                    # The caller has the changes now, even if this transaction fails.
                    self._seen = changes.news.revision
                elif not self._was_written(connection):
                    self._check_nodes(connection, pending)
                seen = self._write(connection, pending)
            self._seen = seen

        self._again(attempt)
        self._write_lines(pending or ())
        self._batch += 1
        self._done.clear()

    def changes(self, *, num_nodes: int, force: bool = False) -> Changes | None:
        """Return the changes by other drivers since the last call; None if there are none.

        Args:
            num_nodes: The number of nodes that the caller knows.
            force: Whether to read the claims of other drivers even if nothing was written.
        """
        if not self.shared:
            return None

        def attempt() -> Changes | None:
            with user_errors(self._engine), self._engine.connect() as connection:
                if not force and self._revision(connection) == self._seen:
                    return None
                return self._read(connection, num_nodes=num_nodes)

        if self._clock.monotonic() - self._looked >= LOOK_S:
            self._again(self._lease.reap_dead_leases)
            self._looked = self._clock.monotonic()
        changes = self._again(attempt)
        if changes is not None:
            self._seen = changes.news.revision
        return changes

    def claim(self, stages: Iterable[Stage]) -> bool:
        """Claim a chain of stages; return False if another driver trains it or has trained it."""
        if not self.shared:
            return True
        spans = spans_of(stages)

        def attempt() -> bool:
            with user_errors(self._engine), self._engine.connect() as connection:
                if len(spans) == 1:  # one row needs no transaction, which saves round trips
                    connection.execution_options(isolation_level="AUTOCOMMIT")
                taken = claim(
                    connection, spans, plan=self._plan, owner=self._lease.owner, seen=self._seen
                )
                # Leaving the context without a commit rolls back partial claims.
                if taken:
                    connection.commit()
                return taken

        taken = self._again(attempt)
        if taken:
            self._held.update(spans.keys())
            self._done -= spans.keys()
        return taken

    def done(self, stages: Iterable[Stage]) -> None:
        """Release a chain that has ended, together with the next batch, which has its results."""
        if self.shared:
            nodes = spans_of(stages).keys()
            self._held.subtract(nodes)
            self._done |= {node for node in nodes if not self._held[node]}

    def pending_requests(
        self, *, num_enqueued: int
    ) -> tuple[Sequence[Act], Sequence[Mapping[str, Any]]]:
        """Return the acts that are not applied yet, and the configurations enqueued meanwhile.

        Args:
            num_enqueued: The number of enqueued configurations that the caller knows.
        """
        study = self._lease.study.id

        def attempt() -> tuple[Sequence[Act], Sequence[Mapping[str, Any]]]:
            with user_errors(self._engine), self._engine.connect() as connection:
                return queued(connection, study), enqueued_since(connection, study, num_enqueued)

        return self._again(attempt)

    # -- implementation ---------------------------------------------------------------

    def _write_lines(self, records: Sequence[Record]) -> None:
        """Write what trials have logged, in a transaction of its own that may fail.

        It comes first, so that a reader who sees an epoch sees its lines.
        """
        lines = [each for each in records if isinstance(each, LinesLogged)]
        now = self._clock.monotonic()
        if lines and now >= self._lines_from and not self._lines.write(lines):
            self._lines_from = now + LINES_PAUSE_S

    def _write(self, connection: Connection, records: Sequence[Record]) -> int:
        """Write a batch unless it was written already.

        Returns:
            The revision of the plan up to which this driver knows everything.
        """
        if self._was_written(connection):
            return self._seen
        self._count_batch(connection)
        revisions = write(connection, records, at=self._clock.now(), shared=self.shared)
        mine = revisions.get(self._plan)
        if self._done:  # other drivers look for free nodes only when the revision changes
            mine = mine or next_revision(connection, self._plan)
            release(connection, self._done, plan=self._plan, owner=self._lease.owner)
        # If other drivers wrote in between, their changes still have to be read.
        return self._seen + 1 if mine == self._seen + 1 else self._seen

    def _count_batch(self, connection: Connection) -> None:
        studies = schema.studies
        counted = connection.execute(
            update(studies)
            .where(studies.c.id == self._lease.study.id, self._is_held())
            .values(batch=self._batch + 1)
        )
        if counted.rowcount != 1:
            check_exists(connection, self._lease.study)
            raise taken_over(self._lease.study.name)

    def _was_written(self, connection: Connection) -> bool:
        """Return whether an earlier attempt committed this batch although its answer was lost."""
        studies = schema.studies
        query = select(studies.c.batch).where(
            studies.c.id == self._lease.study.id,
            # Without the lease, another driver has counted its own batches.
            self._is_held(),
        )
        return bool((connection.execute(query).scalar() or 0) > self._batch)

    def _is_held(self) -> Exists:
        return exists().where(schema.leases.c.owner == self._lease.owner)

    def _last_batch(self) -> int:
        studies = schema.studies
        query = select(studies.c.batch).where(studies.c.id == self._lease.study.id)
        with user_errors(self._engine), self._engine.connect() as connection:
            check_exists(connection, self._lease.study)
            return int(connection.execute(query).scalar_one())

    def _check_nodes(self, connection: Connection, records: Sequence[Record]) -> None:
        mine = [r.node for r in records if isinstance(r, NodeRecord)]
        nodes = schema.nodes
        query = select(func.max(nodes.c.node)).where(nodes.c.plan == self._plan)
        last = connection.execute(query).scalar()
        if mine and last is not None and last >= min(mine):
            raise StoreBusyError(
                f"another study has added to the plan of {self._lease.study.name!r} while the "
                "database did not answer; run it again: it goes on where it is"
            )

    def _read(self, connection: Connection, *, num_nodes: int) -> Changes:
        """Return the changes and the claims of other drivers.

        This does not change the driver, because the connection may still break before the caller
        has the answer. The caller advances ``_seen`` to the revision of the changes once it has
        them.
        """
        # Other drivers continue between these queries. A claim released after this revision shows
        # up as a later change. Nodes are read after claims, so the node of every claim is known.
        revision = self._revision(connection)
        others = claims_of_others(connection, plan=self._plan, owner=self._lease.owner)
        news = news_of(connection, self._plan, since=self._seen, num_known=num_nodes)
        return Changes(news=replace(news, revision=revision), claims=others)

    def _revision(self, connection: Connection) -> int:
        plans = schema.plans
        query = select(plans.c.revision).where(plans.c.id == self._plan)
        return int(connection.execute(query).scalar_one())

    def _again(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Retry until the database answers, for at most ``PATIENCE_S``."""
        began = self._clock.monotonic()
        pause_s = 0.05
        while True:
            try:
                return attempt()
            except StoreUnreachableError as error:
                if self._clock.monotonic() - began > PATIENCE_S:
                    raise
                if pause_s < 0.1:
                    logger.warning("%s; trying again", error)
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
