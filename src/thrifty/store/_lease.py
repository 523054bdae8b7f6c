"""Who runs a study: one living process at a time; and, unless it is shared, a plan."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, Engine, Row, delete, extract, func, insert, select, update

from thrifty.core import Clock, StoreBusyError, StoreUnreachableError

from . import _schema as schema
from ._engine import user_errors
from ._records import StudyInfo
from ._turns import await_turn, next_revision


logger = logging.getLogger(__name__)

STALE_AFTER_S = 60.0
"""A holder on another machine that has not been heard of for so long is taken to be dead."""

SILENT_AFTER_S = 30.0
"""Who could not say for so long that it lives had a reason that others may have, too."""


class Lease:
    """A study held by this process.

    Args:
        engine: the database.
        study: what is held.
        shared: whether others may run other studies of its plan.
        clock: of a database that has none itself.

    Raises:
        StoreBusyError: another living process holds the study, or its plan, and one of both does not share it.
    """

    def __init__(self, engine: Engine, study: StudyInfo, *, shared: bool, clock: Clock) -> None:
        self.owner = secrets.token_hex(16)
        self.study = study
        self.shared = shared
        self._engine = engine
        self._clock = clock
        self._beat_at = 0.0
        self._unsure_until = 0.0
        self._take()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.release()
        except StoreUnreachableError as error:
            # a lease that is not heard of any more ends by itself
            logger.warning("%s", error)

    def heartbeat(self) -> None:
        """Says that the holder is alive.

        Raises:
            StoreBusyError: another process took the study over, because this one was silent for too long.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            now = self._now(connection)
            table = schema.leases
            changed = connection.execute(
                update(table).where(table.c.owner == self.owner).values(heartbeat=now)
            )
        if changed.rowcount != 1:
            raise taken_over(self.study.name)
        if now - self._beat_at > SILENT_AFTER_S:
            self._unsure_until = now + STALE_AFTER_S
        self._beat_at = now

    def bury(self) -> None:
        """Takes what the dead hold of this plan from them, so that others go on with it.

        Who could not beat itself, as all hearts are silent while the database is away, takes nobody for dead
        until the others had time to beat again.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            now = self._now(connection)
            sure = now - self._beat_at <= SILENT_AFTER_S and now >= self._unsure_until
            dead = [
                row.owner
                for row in self._others(connection)
                if (sure or _is_here(row)) and not self._alive(connection, row)
            ]
            self._forget(connection, dead + self._without_lease(connection))

    def release(self) -> None:
        """Gives the study back, and all that is claimed for it."""
        with user_errors(self._engine), self._engine.begin() as connection:
            self._forget(connection, [self.owner])

    def _take(self) -> None:
        with user_errors(self._engine), self._engine.begin() as connection:
            await_turn(connection, self.study.plan)  # who looks at the leases looks alone
            others = self._others(connection)
            for row in others:
                same_study = row.study == self.study.id
                if (same_study or not (row.shared and self.shared)) and self._alive(
                    connection, row
                ):
                    raise self._busy(connection, row)
            gone = [
                row.owner
                for row in others
                if row.study == self.study.id or not self._alive(connection, row)
            ]
            self._forget(connection, gone)
            now = self._now(connection)
            mine = {
                "study": self.study.id,
                "plan": self.study.plan,
                "owner": self.owner,
                "name": self.study.name,
                "shared": self.shared,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "pid_started": _process_start(os.getpid()),
                "since": now,
                "heartbeat": now,
            }
            connection.execute(insert(schema.leases), mine)
            self._beat_at = now

    def _others(self, connection: Connection) -> list[Row[tuple[object, ...]]]:
        table = schema.leases
        query = select(table).where(
            table.c.plan == self.study.plan, table.c.owner != self.owner
        )
        return list(connection.execute(query))

    def _without_lease(self, connection: Connection) -> list[str]:
        """Owners of claims who have been taken over: one that did not hear of it may have claimed since, and died."""
        claims, leases = schema.claims, schema.leases
        query = (
            select(claims.c.owner)
            .where(
                claims.c.plan == self.study.plan,
                claims.c.owner.not_in(select(leases.c.owner)),
            )
            .distinct()
        )
        return list(connection.execute(query).scalars())

    def _forget(self, connection: Connection, owners: list[str]) -> None:
        if not owners:
            return
        await_turn(connection, self.study.plan)
        claims, leases = schema.claims, schema.leases
        freed = connection.execute(delete(claims).where(claims.c.owner.in_(owners)))
        connection.execute(delete(leases).where(leases.c.owner.in_(owners)))
        if freed.rowcount:  # those who wait for it look again
            next_revision(connection, self.study.plan)

    def _busy(self, connection: Connection, row: Row[tuple[object, ...]]) -> StoreBusyError:
        held = row._asdict()
        for_s = self._now(connection) - held["since"]
        return StoreBusyError(
            f"study {held['name']!r} of this task and seed is being run by process {held['pid']} on "
            f"{held['host']}, since {for_s:.0f} s; wait for it, or stop it"
        )

    def _alive(self, connection: Connection, row: Row[tuple[object, ...]]) -> bool:
        held = row._asdict()
        if _is_here(row):
            started = _process_start(held["pid"])
            return started != "" and started == held["pid_started"]
        return bool(self._now(connection) - held["heartbeat"] < STALE_AFTER_S)

    def _now(self, connection: Connection) -> float:
        """The time by one clock for all: that of the server, where there is one."""
        if connection.dialect.name == "sqlite":
            return self._clock.now()
        now = select(extract("epoch", func.clock_timestamp()))
        return float(connection.execute(now).scalar_one())


def _is_here(row: Row[tuple[object, ...]]) -> bool:
    """Whether a holder is on this machine, where processes are asked for directly."""
    held = row._asdict()
    numbered_by = held["pid_started"].partition("@")[2]
    return held["host"] == socket.gethostname() and numbered_by in ("", _pid_namespace())


def taken_over(name: str) -> StoreBusyError:
    """The error of a process whose study is another's now."""
    return StoreBusyError(
        f"another process has taken over study {name!r} while this one was silent for more than "
        f"{STALE_AFTER_S:.0f} s; stop one of them"
    )


def _process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks ("" if there is none), and who numbered it: tells reused numbers apart."""
    try:
        # the command's name, in brackets, may hold spaces; the 20th field after it is the start
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else f"{fields[19]}@{_pid_namespace()}"


def _pid_namespace() -> str:
    """Within what the numbers of processes hold: a container has its own, even where it has its machine's name."""
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
