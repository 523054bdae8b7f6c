"""Who trains a plan: one living process at a time."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from thrifty.core import Clock, StoreBusyError

from ._schema import leases


STALE_AFTER_S = 60.0
"""A holder on another machine that has not been heard of for so long is taken to be dead."""


class Lease:
    """A plan held by this process; a context manager that gives it back."""

    def __init__(self, engine: Engine, plan: int, *, study: str, clock: Clock) -> None:
        self._engine = engine
        self._plan = plan
        self._clock = clock
        self._owner = secrets.token_hex(16)
        self._take(study)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def heartbeat(self) -> None:
        """Says that the holder is alive.

        Raises:
            StoreBusyError: another process took the plan over, because this one was silent for too long.
        """
        mine = (leases.c.plan == self._plan) & (leases.c.owner == self._owner)
        with self._engine.begin() as connection:
            now = self._clock.now()
            changed = connection.execute(update(leases).where(mine).values(heartbeat=now))
        if changed.rowcount != 1:
            raise StoreBusyError(
                "another process has taken over this study while this one was silent for more than "
                f"{STALE_AFTER_S:.0f} s; stop one of them"
            )

    def release(self) -> None:
        """Gives the plan back."""
        mine = (leases.c.plan == self._plan) & (leases.c.owner == self._owner)
        with self._engine.begin() as connection:
            connection.execute(delete(leases).where(mine))

    def _take(self, study: str) -> None:
        now = self._clock.now()
        mine = {
            "owner": self._owner,
            "study": study,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "since": now,
            "heartbeat": now,
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(leases).values(plan=self._plan, **mine))
            return
        except IntegrityError:
            pass  # somebody holds it, or held it and died
        with self._engine.begin() as connection:
            row = connection.execute(select(leases).where(leases.c.plan == self._plan)).first()
            held = None if row is None else row._asdict()
            if held is not None and self._alive(held):
                raise StoreBusyError(
                    f"study {held['study']!r} of this task and seed is being run by process {held['pid']} on "
                    f"{held['host']}, since {now - held['since']:.0f} s; wait for it, or stop it"
                )
            # compare and set: only one of several that find the same dead holder gets it
            same = (leases.c.plan == self._plan) & (leases.c.owner == (held or {}).get("owner"))
            if connection.execute(update(leases).where(same).values(**mine)).rowcount != 1:
                raise StoreBusyError(
                    "another process has just begun to run this study; wait for it"
                )

    def _alive(self, held: dict[str, Any]) -> bool:
        if held["host"] == socket.gethostname():
            started = _process_start(held["pid"])
            return started != "" and started == held["pid_started"]
        return bool(self._clock.now() - held["heartbeat"] < STALE_AFTER_S)


def _process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks ("" if there is none): tells reused numbers apart."""
    try:
        # the command's name, in brackets, may hold spaces; the 20th field after it is the start
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


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
