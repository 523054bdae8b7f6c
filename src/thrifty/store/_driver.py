"""One process that runs a study: what it writes, what it learns of others, and what it claims."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import Connection, Engine, exists, func, select, update

from thrifty.core import Clock, StoreBusyError, StoreUnreachableError, plain_logger
from thrifty.plan import Stage

from . import _schema as schema
from ._claims import claim, claims_of_others, release, spans_of
from ._engine import user_errors
from ._lease import Lease, taken_over
from ._plans import news_of
from ._records import Changes, NodeRecord, Record
from ._turns import await_turn, next_revision
from ._writer import write


logger = plain_logger(__name__)

PATIENCE_S = 300.0
"""How long a database that does not answer is tried again before the study gives up."""
LOOK_S = 5.0
"""How often it is seen to that no dead driver keeps its claims."""

_Answer = TypeVar("_Answer")


class Driver:
    """Writes what a study learns, once each; where its plan is shared, in step with other drivers.

    A database that does not answer is tried again for a while: then StoreUnreachableError is raised. What was written is
    there, and what was not can be written by a later run.

    Args:
        engine: the database.
        lease: the study that is run.
        clock: what the time is.
        revision: of the plan, up to which all is known.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        *,
        clock: Clock,
        revision: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.shared = lease.shared
        self._engine = engine
        self._lease = lease
        self._clock = clock
        self._sleep = sleep
        self._plan = lease.study.plan
        self._seen = revision
        self._held = Counter[int]()
        """How many chains that are under way have each node: a second one may go on where the first has left it."""
        self._done: set[int] = set()
        """Nodes that are claimed still, though their chains have ended."""
        self._looked = clock.monotonic()
        self._batch = self._again(self._last_batch)

    def record(self, records: Sequence[Record]) -> None:
        """Writes a batch durably: all of it, once, whatever happens to the connection.

        Raises:
            StoreBusyError: another process has taken the study over.
            StoreWriteError: full disk, read-only place.
            StoreUnreachableError: the database has not answered for a long time.
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
        """Adds nodes to the plan while nobody else can.

        Args:
            add: is told what others have done, and gives what is to be written. It is called once.
            num_nodes: that are known.

        Raises:
            StoreBusyError: the connection broke just then, and others have added nodes since; or as ``record``.
        """
        pending: Sequence[Record] | None = None

        def attempt() -> None:
            nonlocal pending
            with user_errors(self._engine), self._engine.begin() as connection:
                await_turn(connection, self._plan)
                if pending is None:
                    changes = self._read(connection, num_nodes=num_nodes)
                    pending = add(changes)
                    # The caller has the news now, whatever becomes of this transaction.
                    self._seen = changes.news.revision
                elif not self._was_written(connection):
                    self._check_nodes(connection, pending)
                seen = self._write(connection, pending)
            self._seen = seen

        self._again(attempt)
        self._batch += 1
        self._done.clear()

    def changes(self, *, num_nodes: int, anyway: bool = False) -> Changes | None:
        """What others have done since the last look; None: nothing.

        Args:
            num_nodes: that are known.
            anyway: looks at what others are training though nothing was written.
        """
        if not self.shared:
            return None

        def attempt() -> Changes | None:
            with user_errors(self._engine), self._engine.connect() as connection:
                if not anyway and self._revision(connection) == self._seen:
                    return None
                return self._read(connection, num_nodes=num_nodes)

        if self._clock.monotonic() - self._looked >= LOOK_S:
            self._again(self._lease.bury)
            self._looked = self._clock.monotonic()
        changes = self._again(attempt)
        if changes is not None:
            self._seen = changes.news.revision
        return changes

    def claim(self, stages: Iterable[Stage]) -> bool:
        """Takes a chain of stages, so that nobody else trains it; False: somebody does, or has."""
        if not self.shared:
            return True
        spans = spans_of(stages)

        def attempt() -> bool:
            with user_errors(self._engine), self._engine.connect() as connection:
                if len(spans) == 1:  # one row needs no transaction: one message there and back
                    connection.execution_options(isolation_level="AUTOCOMMIT")
                taken = claim(
                    connection,
                    spans,
                    plan=self._plan,
                    owner=self._lease.owner,
                    seen=self._seen,
                )
                # leaving without a commit gives back what was taken
                if taken:
                    connection.commit()
                return taken

        taken = self._again(attempt)
        if taken:
            self._held.update(spans.keys())
            self._done -= spans.keys()
        return taken

    def done(self, stages: Iterable[Stage]) -> None:
        """A chain has ended: it is given back with the next batch, which has what it led to."""
        if self.shared:
            nodes = spans_of(stages).keys()
            self._held.subtract(nodes)
            self._done |= {node for node in nodes if not self._held[node]}

    # -- inside -----------------------------------------------------------------------

    def _write(self, connection: Connection, records: Sequence[Record]) -> int:
        """Writes a batch unless it is there already; gives the plan's revision up to which all is known."""
        if self._was_written(connection):
            return self._seen
        self._count_batch(connection)
        revisions = write(connection, records, at=self._clock.now(), shared=self.shared)
        mine = revisions.get(self._plan)
        if self._done:  # others learn by a revision that nodes are free
            mine = mine or next_revision(connection, self._plan)
            release(connection, self._done, plan=self._plan, owner=self._lease.owner)
        # what others wrote in between is still to be read
        return self._seen + 1 if mine == self._seen + 1 else self._seen

    def _count_batch(self, connection: Connection) -> None:
        studies, leases = schema.studies, schema.leases
        held = exists().where(leases.c.owner == self._lease.owner)
        counted = connection.execute(
            update(studies)
            .where(studies.c.id == self._lease.study.id, held)
            .values(batch=self._batch + 1)
        )
        if counted.rowcount != 1:
            raise taken_over(self._lease.study.name)

    def _was_written(self, connection: Connection) -> bool:
        """Whether the present batch was committed by an attempt whose answer got lost."""
        studies = schema.studies
        query = select(studies.c.batch).where(studies.c.id == self._lease.study.id)
        return bool((connection.execute(query).scalar() or 0) > self._batch)

    def _last_batch(self) -> int:
        studies = schema.studies
        query = select(studies.c.batch).where(studies.c.id == self._lease.study.id)
        with user_errors(self._engine), self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def _check_nodes(self, connection: Connection, records: Sequence[Record]) -> None:
        mine = [r.node for r in records if isinstance(r, NodeRecord)]
        nodes = schema.nodes
        query = select(func.max(nodes.c.node)).where(nodes.c.plan == self._plan)
        last = connection.execute(query).scalar()
        if mine and last is not None and last >= min(mine):
            raise StoreBusyError(
                f"another study has added to the plan of {self._lease.study.name!r} while the database did not answer; run it again: it goes on where it is"
            )

    def _read(self, connection: Connection, *, num_nodes: int) -> Changes:
        """Read the news and the claims of other drivers.

        This changes nothing here: the connection may still break before the caller has the answer. The
        caller moves ``_seen`` on to the revision of the news when it has them.
        """
        # Other drivers go on between these queries. Claims given back after this revision count as
        # news later, and nodes of the claims are read after the claims, so each of them is known.
        revision = self._revision(connection)
        others = claims_of_others(connection, plan=self._plan, owner=self._lease.owner)
        news = news_of(connection, self._plan, since=self._seen, num_known=num_nodes)
        return Changes(news=replace(news, revision=revision), claims=others)

    def _revision(self, connection: Connection) -> int:
        plans = schema.plans
        query = select(plans.c.revision).where(plans.c.id == self._plan)
        return int(connection.execute(query).scalar_one())

    def _again(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Tries until the database answers."""
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
