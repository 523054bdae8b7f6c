"""SQLite files that this process can read but not write: another user's, or on a read-only disk.

SQLite keeps a write-ahead log (``-wal``) and an index of it (``-shm``) beside the file, and creates
them even for reading. There are three ways around that, tried in this order:

1. ``mode=ro`` works if both exist (a process has the database open) or the folder is writeable.
2. ``immutable=1`` reads only the file. That is correct only without a log, which each connection
   checks anew.
3. A crash leaves a log without an index. Then a private copy is opened, whose log can be read.

If an earlier version wrote the database, a private copy is also what gets migrated.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import weakref
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.pool import NullPool


WAL = "-wal"


def can_write(file: Path) -> bool:
    """Return whether this process can write an existing SQLite file and create files beside it."""
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)


class ReadOnlyFile:
    """A read-only SQLite file; each connection sees the data at the time when it is opened."""

    def __init__(self, file: Path, *, timeout_s: float) -> None:
        self._file = file
        self._timeout_s = timeout_s
        self._copy: Path | None = None
        self._copied: tuple[tuple[int, int], ...] = ()
        self._folders: list[weakref.finalize[..., ReadOnlyFile]] = []

    def connect(self) -> sqlite3.Connection:
        """Open a read-only connection."""
        try:
            return self._opened(self._file, "mode=ro")
        except sqlite3.OperationalError:
            if not self._file.exists():
                raise
        if not self._has_log():
            return self._opened(self._file, "immutable=1")
        return self._opened(self._private_copy(), "mode=ro")

    def engine(self, address: URL) -> Engine:
        """Return an engine on read-only connections; ``address`` appears in messages."""
        # Each connection checks anew whether there is a log: another user may begin to write.
        return create_engine(address, creator=self.connect, poolclass=NullPool)

    def changeable_copy(self) -> Path:
        """Return a private copy that can be changed; no other process sees the changes."""
        target = self._folder() / self._file.name
        source = self.connect()
        try:
            copy = sqlite3.connect(target)
            try:
                source.backup(copy)
            finally:
                copy.close()
        finally:
            source.close()
        return target

    def close(self) -> None:
        """Remove all copies."""
        while self._folders:
            self._folders.pop()()

    def _opened(self, file: Path, how: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(file))}?{how}",
            uri=True,
            timeout=self._timeout_s,
            check_same_thread=False,
        )
        try:
            # The first query opens the file, so only then can opening fail.
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _has_log(self) -> bool:
        log = Path(f"{self._file}{WAL}")
        return log.exists() and log.stat().st_size > 0

    def _private_copy(self) -> Path:
        """Return a copy of the file and its log; copy again if one of them has changed."""
        log = Path(f"{self._file}{WAL}")
        seen = tuple((s.st_mtime_ns, s.st_size) for s in (self._file.stat(), log.stat()))
        if self._copy is None or seen != self._copied:
            self._copy, self._copied = self._folder() / self._file.name, seen
            shutil.copyfile(self._file, self._copy)
            shutil.copyfile(log, f"{self._copy}{WAL}")
        return self._copy

    def _folder(self) -> Path:
        """Create a folder that is removed together with this object."""
        folder = tempfile.mkdtemp(prefix="thrifty-")
        self._folders.append(weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True))
        return Path(folder)
