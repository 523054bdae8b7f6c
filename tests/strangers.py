"""Doing something as a user who may read a folder but not write it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.study.processes import FORK


NOBODY = 65534


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that everybody can read; the temporary folders of pytest belong to one user."""
    folder = Path(tempfile.mkdtemp(prefix="thrifty-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


def take_away_writing(folder: Path) -> None:
    """Nobody may write the folder and what is in it; root may all the same, but is not asked."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)


def as_stranger(do: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process without rights; an error is returned as its text."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=_run, args=(theirs, do, args), daemon=True)
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    finally:
        child.join()
    return found


def _run(connection: Connection, do: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        connection.send(do(*args))
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to see it)
        connection.send(f"{type(error).__name__}: {error}")
