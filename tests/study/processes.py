"""Studies in processes of their own, started in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


# A clean process that has torch loaded and forks others.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.study.warm"])


_REPOSITORY = Path(__file__).parents[2]


def start_server() -> None:
    """Start the server that forks, if it does not run yet."""
    # It imports from the folder in which it is started, and does not say if it cannot.
    with contextlib.chdir(_REPOSITORY):
        forkserver.ensure_running()


def started(target: Callable[..., Any], *args: Any) -> BaseProcess:
    start_server()
    child = FORK.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def exit_code(child: BaseProcess) -> int | None:
    """Return the exit code of a process once it has ended, however long that takes."""
    child.join()
    return child.exitcode


def run_script(
    path: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a script in its folder, as a program for which torch is loaded already.

    Returns:
        Its exit code, and all that it has printed.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
        child = started(_run_as_main, path, arguments, dict(environment or {}), printed.name)
        code = exit_code(child)
        return code, printed.read()


def _run_as_main(
    path: Path, arguments: tuple[str, ...], environment: dict[str, str], printed: str
) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    os.chdir(path.parent)
    sys.argv = [path.name, *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


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
