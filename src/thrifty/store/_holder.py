"""Who holds a study, and whether that process lives."""

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
"""A holder on another machine that has not been heard of for so long is taken to be dead."""


def this_process() -> dict[str, Any]:
    """The columns of a lease by which its holder is found again."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": _process_start(pid)}


def process_tag() -> str:
    """Return a name of this process for file names: machine, number and start.

    Nothing else has the same one, not even a later process of the same number.
    """
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_ticks(_process_start(pid))}"


def is_tag_of_dead(tag: str) -> bool:
    """Say whether a process of this machine had a tag and is gone; of another machine nothing is known."""
    machine, _, rest = tag.partition("-")
    pid, _, started = rest.partition("-")
    if machine != _machine() or not (pid.isascii() and pid.isdecimal()) or not started:
        return False
    return _ticks(_process_start(int(pid))) != started


def is_here(lease: Row[Any]) -> bool:
    """Whether a holder is on this machine, where processes are asked for directly."""
    numbered_by = lease.pid_started.partition("@")[2]
    return lease.host == socket.gethostname() and numbered_by in ("", _pid_namespace())


def lives(lease: Row[Any], *, now: float) -> bool:
    """Whether a holder lives; of one elsewhere only what it said of itself is known."""
    if is_here(lease):
        started = _process_start(lease.pid)
        return started != "" and started == lease.pid_started
    return bool(now - lease.heartbeat < STALE_AFTER_S)


def time_of(connection: Connection, clock: Clock) -> float:
    """The time by one clock for all: that of the server, where there is one."""
    if connection.dialect.name == "sqlite":
        return clock.now()
    return float(
        connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one()
    )


def standing(
    connection: Connection, written: Mapping[int, str], *, clock: Clock
) -> dict[int, str]:
    """The states of studies (by number) as they were written; but a "running" one that nobody runs is "interrupted".

    Whoever is killed cannot write that it ends.
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
    """When a process started, in the kernel's ticks ("" if there is none), and who numbered it: tells reused numbers apart."""
    try:
        # the command's name, in brackets, may hold spaces; the 20th field after it is the start
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else f"{fields[19]}@{_pid_namespace()}"


def _ticks(start: str) -> str:
    return start.partition("@")[0]


def _machine() -> str:
    """Return a short name of what numbers this process: a machine since it booted, or a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    name = f"{socket.gethostname()} {boot} {_pid_namespace()}"
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


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
