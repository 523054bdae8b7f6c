"""Save the coverage data of worker processes that a fork server kills.

Python imports this module when it starts, because `make coverage` puts this folder on
``PYTHONPATH``. Workers end by SIGKILL, after which coverage.py cannot write what it measured.
Therefore the fork server of a measured run first asks a worker to save and to stop, and then kills
it. What thrifty sees is the same: a process killed by signal 9.
"""

from __future__ import annotations

import os
import signal
import sys
import time


SAVE_S = 5.0
"""Seconds that a worker may take to save: a handler waits for the end of an operation of torch."""

_kill = os.kill
_server = os.getpid()


def _save_and_stop(*_: object) -> None:
    import coverage  # noqa: PLC0415 (only in environments that measure)

    if (measuring := coverage.Coverage.current()) is not None:
        measuring.save()
    _kill(os.getpid(), signal.SIGSTOP)


def _save_and_kill(pid: int, number: int) -> None:
    if number == signal.SIGKILL and os.getpid() == _server:  # forks kill as usual
        _kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + SAVE_S
        events = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        while not os.waitid(os.P_PID, pid, events) and time.monotonic() < deadline:
            time.sleep(0.002)
    _kill(pid, number)


if "COVERAGE_PROCESS_CONFIG" in os.environ and "thrifty.core._fork_server" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, _save_and_stop)  # its forks inherit the handler
    os.kill = _save_and_kill
