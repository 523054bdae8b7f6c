"""Identification of the process that holds a study, and checks that it is alive."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, extract, func, select

from thrifty.core import Clock

from . import _schema as schema


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


def lives(lease: Row[Any], *, now: float) -> bool:
    """Return whether a holder is alive; on another machine only its heartbeat tells."""
    if is_here(lease):
        started = _process_start(lease.pid)
        return started != "" and started == lease.pid_started
    return bool(now - lease.heartbeat < STALE_AFTER_S)


def time_of(connection: Connection, clock: Clock) -> float:
    """Return the time by a clock that all drivers share: the database server's, if there is one."""
    if connection.dialect.name == "sqlite":
        return clock.now()
    return float(
        connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one()
    )


def standing(
    connection: Connection, written: Mapping[int, str], *, clock: Clock
) -> dict[int, str]:
    """Return the states of studies, by study id, with dead "running" studies as "interrupted".

    ``written`` are the recorded states. A process that is killed cannot record that its study has
    ended.
    """
    states = dict(written)
    if "running" not in states.values():
        return states
    now = time_of(connection, clock)
    held = {
        lease.study
        for lease in connection.execute(select(schema.leases))
        if lease.study in states and lives(lease, now=now)
    }
    return {
        study: "interrupted" if state == "running" and study not in held else state
        for study, state in states.items()
    }


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
