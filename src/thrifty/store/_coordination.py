"""Coordination of several drivers on one plan: leases, heartbeats, claims of stages, turns."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    Integer,
    Row,
    String,
    Table,
    bindparam,
    delete,
    extract,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from thrifty.core import (
    Clock,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
    StudyNotFoundError,
    plain_logger,
)
from thrifty.plan import Stage

from . import _schema as schema
from ._engine import user_errors
from ._records import Claim, StudyInfo


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
            except (StoreBusyError, StudyNotFoundError):
                return  # the next write fails with the same error
            except StoreError as error:
                logger.warning("%s", error)


STALE_AFTER_S = 60.0
"""A holder on another machine counts as dead if its last heartbeat is older than this."""


def this_process() -> dict[str, Any]:
    """Return the columns of a lease that identify the process that holds it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": _process_start(pid)}


def process_tag() -> str:
    """Return a name of this process for file names, made of machine, pid and start time.

    It is unique: a later process with the same pid has another name.
    """
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_ticks(_process_start(pid))}"


def is_tag_of_dead(tag: str) -> bool:
    """Return whether a tag is that of a dead process of this machine; False for other machines."""
    machine, _, rest = tag.partition("-")
    pid, _, started = rest.partition("-")
    if machine != _machine() or not (pid.isascii() and pid.isdecimal()) or not started:
        return False
    return _ticks(_process_start(int(pid))) != started


def is_here(lease: Row[Any]) -> bool:
    """Return whether a holder is on this machine, so that its process can be looked up."""
    numbered_by = lease.pid_started.partition("@")[2]
    return lease.host == socket.gethostname() and numbered_by in ("", _pid_namespace())


def is_alive(lease: Row[Any], *, now: float) -> bool:
    """Return whether a holder is alive; on another machine only its heartbeat tells."""
    if is_here(lease):
        started = _process_start(lease.pid)
        return started != "" and started == lease.pid_started
    return bool(now - lease.heartbeat < STALE_AFTER_S)


def time_of(connection: Connection, clock: Clock) -> float:
    """Return the time by a clock that all drivers share: the database server's, if there is one."""
    if connection.dialect.name == "sqlite":
        return clock.now()
    return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())


ALIVE = frozenset({"running", "paused"})
"""States of a study that a process holds."""


def standing(connection: Connection, written: Mapping[int, str], *, clock: Clock) -> dict[int, str]:
    """Return the states of studies, by study id; those whose process is gone are "interrupted".

    ``written`` are the recorded states. A process that is killed cannot record that its study has
    ended.
    """
    states = dict(written)
    if not ALIVE & set(states.values()):
        return states
    held = held_studies(connection, clock=clock)
    return {
        study: "interrupted" if state in ALIVE and study not in held else state
        for study, state in states.items()
    }


def held_studies(connection: Connection, *, clock: Clock) -> set[int]:
    """Return the ids of the studies that live processes hold, whatever their recorded states.

    A process holds its study before it records that the study is running.
    """
    now = time_of(connection, clock)
    leases = connection.execute(select(schema.leases))
    return {lease.study for lease in leases if is_alive(lease, now=now)}


def is_held(connection: Connection, plan: int, *, clock: Clock) -> bool:
    """Return whether a live process runs a study of a plan now."""
    now = time_of(connection, clock)
    leases = connection.execute(select(schema.leases).where(schema.leases.c.plan == plan))
    return any(is_alive(lease, now=now) for lease in leases)


def check_exists(connection: Connection, study: StudyInfo) -> None:
    """Check that a study has not been deleted; a later study may have got its id and its name.

    Raises:
        StudyNotFoundError: It has.
    """
    table = schema.studies
    created_at = select(table.c.created_at).where(table.c.id == study.id)
    if connection.execute(created_at).scalar() != study.created_at:
        raise StudyNotFoundError(
            f"study {study.name!r} was deleted while this process used it; run it again to begin "
            "it anew"
        )


def _process_start(pid: int) -> str:
    """Return when a process started, in kernel ticks, and its pid namespace; "" if it is gone.

    This tells apart processes that have used the same pid.
    """
    try:
        # The command name is in parentheses and may contain spaces. The 20th field after it is
        # the start time.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else f"{fields[19]}@{_pid_namespace()}"


def _ticks(start: str) -> str:
    return start.partition("@")[0]


def _machine() -> str:
    """Return a short name of the machine since its last boot, or of the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    name = f"{socket.gethostname()} {boot} {_pid_namespace()}"
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


def _pid_namespace() -> str:
    """Return the namespace in which pids are unique.

    A container has a namespace of its own, even if it has the host name of its machine.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _without_proc(pid: int) -> str:
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "unknown"
    return "unknown"


SILENT_AFTER_S = 30.0
"""If our own heartbeat is this late, assume an outage and declare no other driver dead."""


class Lease:
    """A lease by which this process holds a study.

    Args:
        engine: The database.
        study: The study to hold.
        shared: Whether other processes may run other studies of its plan.
        clock: The clock for a database without a server.

    Raises:
        StoreBusyError: Another live process holds the study; or it holds the plan, and one of the
            two processes does not share it.
        StudyNotFoundError: Another process has deleted the study.
    """

    def __init__(self, engine: Engine, study: StudyInfo, *, shared: bool, clock: Clock) -> None:
        self.owner = secrets.token_hex(16)
        self.study = study
        self.shared = shared
        self._engine = engine
        self._clock = clock
        self._beat_at = 0.0
        """Last heartbeat by the clock of the database, which may be changed."""
        self._beat_after_s = 0.0
        """Last heartbeat by the monotonic clock of this process."""
        self._unsure_until_s = 0.0
        """Time by the same clock; until then no driver on another machine counts as dead."""
        self._take()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.release()
        except StoreUnreachableError as error:
            # A lease without heartbeats expires by itself.
            logger.warning("%s", error)

    def heartbeat(self) -> None:
        """Record that the holder is alive.

        Raises:
            StoreBusyError: Another process has taken over the study, because this one was silent
                for too long.
            StudyNotFoundError: Another process has deleted the study, for the same reason.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            now = self._now(connection)
            table = schema.leases
            changed = connection.execute(
                update(table).where(table.c.owner == self.owner).values(heartbeat=now)
            )
            if changed.rowcount != 1:
                check_exists(connection, self.study)
                raise taken_over(self.study.name)
        if not self._has_beaten(now):
            self._doubt()
        self._note_beat(now)

    def reap_dead_leases(self) -> None:
        """Release the leases and claims of this plan that dead drivers hold.

        While the database is away, no driver can send heartbeats. So a driver whose own heartbeat
        was late declares no driver on another machine dead until the others have had time for a
        heartbeat.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            now = self._now(connection)
            sure = self._has_beaten(now) and self._clock.monotonic() >= self._unsure_until_s
            dead = [
                row.owner
                for row in self._others(connection)
                if (sure or is_here(row)) and not is_alive(row, now=now)
            ]
            self._forget(connection, dead + self._without_lease(connection))

    def is_alone(self) -> bool:
        """Return whether no other live process runs a study of this plan."""
        with user_errors(self._engine), self._engine.connect() as connection:
            now = self._now(connection)
            return not any(is_alive(row, now=now) for row in self._others(connection))

    def release(self) -> None:
        """Release the study and all its claims."""
        with user_errors(self._engine), self._engine.begin() as connection:
            self._forget(connection, [self.owner])

    def _take(self) -> None:
        with user_errors(self._engine), self._engine.begin() as connection:
            lock_plan(connection, self.study.plan)  # one process at a time may check leases
            check_exists(connection, self.study)
            now = self._now(connection)
            others = self._others(connection)
            gone = []
            for row in others:
                beside = row.shared and self.shared and row.study != self.study.id
                if is_alive(row, now=now):
                    if not beside:
                        raise _busy(row, now=now)
                elif beside and not is_here(row):
                    # The database may have been away, so give this driver time for a heartbeat.
                    self._doubt()
                else:
                    gone.append(row.owner)
            self._forget(connection, gone)
            mine = {
                "study": self.study.id,
                "plan": self.study.plan,
                "owner": self.owner,
                "name": self.study.name,
                "shared": self.shared,
                **this_process(),
                "since": now,
                "heartbeat": now,
            }
            connection.execute(insert(schema.leases), mine)
            self._note_beat(now)

    def _has_beaten(self, now: float) -> bool:
        """Return whether the last heartbeat of this lease is recent by both clocks.

        If it is not, the database was away or its clock was changed, and live drivers look dead.
        """
        since_s = self._clock.monotonic() - self._beat_after_s
        return 0.0 <= now - self._beat_at <= SILENT_AFTER_S and since_s <= SILENT_AFTER_S

    def _note_beat(self, now: float) -> None:
        self._beat_at, self._beat_after_s = now, self._clock.monotonic()

    def _doubt(self) -> None:
        self._unsure_until_s = self._clock.monotonic() + STALE_AFTER_S

    def _others(self, connection: Connection) -> list[Row[Any]]:
        table = schema.leases
        query = select(table).where(table.c.plan == self.study.plan, table.c.owner != self.owner)
        return list(connection.execute(query))

    def _without_lease(self, connection: Connection) -> list[str]:
        """Return the owners of claims that have no lease.

        Their studies were taken over. A driver that did not notice may have claimed nodes after
        that, and then died.
        """
        claims, leases = schema.claims, schema.leases
        query = (
            select(claims.c.owner)
            .where(claims.c.plan == self.study.plan, claims.c.owner.not_in(select(leases.c.owner)))
            .distinct()
        )
        return list(connection.execute(query).scalars())

    def _forget(self, connection: Connection, owners: list[str]) -> None:
        if not owners:
            return
        lock_plan(connection, self.study.plan)
        claims, leases = schema.claims, schema.leases
        freed = connection.execute(delete(claims).where(claims.c.owner.in_(owners)))
        connection.execute(delete(leases).where(leases.c.owner.in_(owners)))
        if freed.rowcount:  # makes drivers that wait for these nodes look again
            next_revision(connection, self.study.plan)

    def _now(self, connection: Connection) -> float:
        return time_of(connection, self._clock)


def taken_over(name: str) -> StoreBusyError:
    """Return the error for a process whose study another process has taken over."""
    return StoreBusyError(
        f"another process has taken over study {name!r} while this one was silent for more than "
        f"{STALE_AFTER_S:.0f} s; stop one of them"
    )


def _busy(held: Row[Any], *, now: float) -> StoreBusyError:
    return StoreBusyError(
        f"study {held.name!r} of this task and seed is being run by process {held.pid} on "
        f"{held.host}, since {max(0.0, now - held.since):.0f} s; wait for it, or stop it"
    )


_OURS = int.from_bytes(b"plan", "big")
"""Key that separates our advisory locks from those of other programs in the same database."""


def lock_plan(connection: Connection, plan: int) -> None:
    """Lock a plan for this transaction; wait until no other transaction writes about it."""
    _queue(connection, plan)
    same = {"revision": schema.plans.c.revision}
    connection.execute(update(schema.plans).where(schema.plans.c.id == plan).values(same))


def next_revision(connection: Connection, plan: int) -> int:
    """Lock a plan for this transaction, increment its revision, and return the new revision."""
    _queue(connection, plan)
    counted = (
        update(schema.plans)
        .where(schema.plans.c.id == plan)
        .values(revision=schema.plans.c.revision + 1)
        .returning(schema.plans.c.revision)
    )
    return int(connection.execute(counted).scalar_one())


def _queue(connection: Connection, plan: int) -> None:
    """Wait for an advisory lock on PostgreSQL, because a commit wakes only one waiter of it.

    If transactions waited for the row instead, a commit would wake all of them, and all but one
    would have to wait again.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_OURS, plan)))


Spans = Mapping[int, tuple[int, int]]
"""First and last epoch by node."""


def spans_of(stages: Iterable[Stage]) -> dict[int, tuple[int, int]]:
    """Return the span of epochs that a chain of stages trains of each node.

    >>> spans_of([
    ...     Stage(node=0, start=0, stop=3),
    ...     Stage(node=0, start=3, stop=5),
    ...     Stage(node=2, start=5, stop=9),
    ... ])
    {0: (0, 5), 2: (5, 9)}
    """
    spans: dict[int, tuple[int, int]] = {}
    for stage in stages:
        spans[stage.node] = (spans.get(stage.node, (stage.start, 0))[0], stage.stop)
    return spans


def claim(connection: Connection, spans: Spans, *, plan: int, owner: str, seen: int) -> bool:
    """Claim all nodes for a driver; return whether that succeeded.

    It fails if another driver has claimed one of the nodes, or if something was written about one
    after revision ``seen``. The caller must then roll back the transaction.
    """
    # Lock rows in the order of their keys, so that two drivers never wait for each other.
    return all(
        _claim_one(connection, node, spans[node], plan=plan, owner=owner, seen=seen)
        for node in sorted(spans)
    )


def _claim_one(
    connection: Connection, node: int, span: tuple[int, int], *, plan: int, owner: str, seen: int
) -> bool:
    values = {"on": plan, "of": node, "first": span[0], "last": span[1], "by": owner, "seen": seen}
    return connection.execute(_TAKE[connection.dialect.name], values).first() is not None


def _take_by(insert: Callable[[Table], Any]) -> Executable:
    """Return the statement that claims a node; it is built once, because every stage runs it."""
    nodes, claims = schema.nodes, schema.claims
    fresh = (
        select(
            nodes.c.plan,
            nodes.c.node,
            bindparam("first", type_=Integer),
            bindparam("last", type_=Integer),
            bindparam("by", type_=String),
        )
        .where(
            nodes.c.plan == bindparam("on"),
            nodes.c.node == bindparam("of"),
            nodes.c.revision <= bindparam("seen"),
        )
        # Wait for drivers that are writing about this node, and then see what they wrote.
        .with_for_update(read=True)
    )
    statement = insert(claims).from_select(["plan", "node", "start", "stop", "owner"], fresh)
    mine: Executable = statement.on_conflict_do_update(
        index_elements=["plan", "node"],
        set_={"start": statement.excluded.start, "stop": statement.excluded.stop},
        where=claims.c.owner == bindparam("by"),
    ).returning(claims.c.node)
    return mine


_TAKE = {"sqlite": _take_by(sqlite.insert), "postgresql": _take_by(postgresql.insert)}


def release(connection: Connection, nodes: Collection[int], *, plan: int, owner: str) -> None:
    """Release a driver's claims on nodes."""
    claims = schema.claims
    connection.execute(
        delete(claims).where(
            claims.c.plan == plan, claims.c.owner == owner, claims.c.node.in_(nodes)
        )
    )


def claims_of_others(connection: Connection, *, plan: int, owner: str) -> tuple[Claim, ...]:
    """Return the claims of other drivers."""
    claims = schema.claims
    query = (
        select(claims.c.node, claims.c.start, claims.c.stop)
        .where(claims.c.plan == plan, claims.c.owner != owner)
        .order_by(claims.c.node)
    )
    return tuple(
        Claim(node=node, start=start, stop=stop) for node, start, stop in connection.execute(query)
    )
