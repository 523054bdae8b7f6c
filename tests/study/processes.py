"""Studies in processes of their own, started in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


# A clean process that has torch loaded and forks others.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.study.warm"])


_REPOSITORY = Path(__file__).parents[2]


def started(target: Callable[..., Any], *args: Any) -> BaseProcess:
    # The server imports from the folder in which it is started, and does not say if it cannot.
    with contextlib.chdir(_REPOSITORY):
        forkserver.ensure_running()
    child = FORK.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def exit_code(child: BaseProcess) -> int | None:
    """Return the exit code of a process once it has ended, however long that takes."""
    child.join()
    return child.exitcode


class At:
    """Observer that acts at the n-th event, once."""

    def __init__(self, count: int, action: Callable[[], object]) -> None:
        self._left = count
        self._action = action

    def on_event(self, event: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


def die() -> None:
    """End the process as abruptly as a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)
