"""Database access of a process that runs a study: records, other drivers' changes, and claims."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import Connection, Engine, Exists, exists, func, select, update

from thrifty.core import Clock, StoreBusyError, StoreUnreachableError, plain_logger
from thrifty.plan import Stage

from . import _schema as schema
from ._engine import user_errors
from ._plans import news_of
from ._records import Changes, NodeRecord, Record
from ._writer import write
from .coordination._claims import (
    claim,
    claims_of_others,
    lock_plan,
    next_revision,
    release,
    spans_of,
)
from .coordination._leases import Lease, check_exists, taken_over


logger = plain_logger(__name__)

PATIENCE_S = 300.0
"""How long to retry a database that does not answer before the study fails."""
LOOK_S = 5.0
"""Seconds between releases of the claims of dead drivers."""

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

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        *,
        clock: Clock,
        revision: int,
    ) -> None:
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
                    connection,
                    spans,
                    plan=self._plan,
                    owner=self._lease.owner,
                    seen=self._seen,
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

    # -- implementation ---------------------------------------------------------------

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
