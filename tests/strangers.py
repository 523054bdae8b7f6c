"""Helpers to run code as a user who may read a folder but not write it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.study.processes import FORK, started


STRANGER = 65534


@contextmanager
def public_folder() -> Iterator[Path]:
    """Yield a folder that every user can read; pytest's temporary folders belong to one user."""
    folder = Path(tempfile.mkdtemp(prefix="thrifty-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


def take_away_writing(folder: Path) -> None:
    """Remove write permission from a folder and its contents; root can still write."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)


def as_stranger(do: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in an unprivileged process, or the text of its error."""
    ours, theirs = FORK.Pipe()
    child = started(_run, theirs, do, args)
    theirs.close()
    try:
        found = ours.recv()
    finally:
        child.join()
    return found


def _run(connection: Connection, do: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Later imports may fail: Python itself may lie where only its owner can read.
    assert "tests.study.warm" in sys.modules
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
    try:
        connection.send(do(*args))
    except BaseException as error:  # noqa: BLE001 (the test checks every error)
        connection.send(f"{type(error).__name__}: {error}")
