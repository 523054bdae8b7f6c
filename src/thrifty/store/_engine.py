"""Engines of databases, and read-only access."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Executable,
    create_engine,
    event,
    insert,
    inspect,
    text,
)
from sqlalchemy.exc import (
    DatabaseError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.pool import NullPool, StaticPool

from thrifty.core import (
    MissingExtraError,
    StoreError,
    StoreUnreachableError,
    StoreVersionError,
    StoreWriteError,
    StudyNotFoundError,
    UsageError,
    plain_logger,
)

from ._address import read_address, redact, redact_url, refusal
from ._schema import VERSION, metadata, version_table


logger = plain_logger(__name__)

WAL = "-wal"


def can_write(file: Path) -> bool:
    """Return whether this process can write an existing SQLite file and create files beside it."""
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)


class ReadOnlyFile:
    """A read-only SQLite file; each connection sees the data at the time when it is opened.

    SQLite keeps a write-ahead log (``-wal``) and an index of it (``-shm``) beside the file, and
    creates them even for reading. There are three ways around that, tried in this order:

    1. ``mode=ro`` works if both exist (a process has the database open) or the folder is writeable.
    2. ``immutable=1`` reads only the file. That is correct only without a log, which each
       connection checks anew.
    3. A crash leaves a log without an index. Then a private copy is opened, whose log can be read.

    If an earlier version wrote the database, a private copy is also what gets migrated.
    """

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


# A silent network must be noticed, and a driver that is cut off must not hold locks for ever.
_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "options": "-c lock_timeout=30s -c idle_in_transaction_session_timeout=60s",
}

_PATIENCE_S = 30.0
"""How long to wait for another process that has locked a SQLite database."""

_PASSING = frozenset({"08", "40", "53300", "55P03", "57P01", "57P02", "57P03"})
"""SQLSTATE codes of transient errors.

They are: no connection, a lost race, too many connections, a server restart.
"""


def open_engine(url: str, *, create: bool) -> Engine:
    """Open a database, create or migrate it if needed, and return its engine.

    A SQLite file that exists and cannot be written is opened read-only.

    Raises:
        UsageError: ``url`` is not a database address.
        StudyNotFoundError: There is no such file and ``create`` is False.
        StoreVersionError: A newer thrifty wrote the database.
        StoreError: The database server does not admit this user, or has no such database.
        StoreWriteError: The database cannot be created or migrated.
        StoreUnreachableError: The database server does not answer.
        MissingExtraError: PostgreSQL's driver is not installed.
    """
    address = read_address(url)
    backend = address.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UsageError(
            f"{backend!r} is not a database that thrifty knows; write sqlite:///thrifty.db or "
            "postgresql+psycopg://host/name"
        )
    if backend == "sqlite":
        file = _file_of(address)
        if file is not None:
            _check_file(file, create=create)
            if file.exists() and not can_write(file):
                return _read_only(address, file)
        engine = _sqlite(address)
    else:
        engine = _postgresql(address)
    try:
        with user_errors(engine), engine.connect() as connection, _alone(connection):
            _bring_up_to_date(connection, url)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _file_of(address: URL) -> Path | None:
    """Return the file of a SQLite database, or None if it is in memory."""
    if address.database in (None, "", ":memory:"):
        return None
    return Path(str(address.database))


def _sqlite(address: URL) -> Engine:
    options: dict[str, Any] = {"connect_args": {"timeout": _PATIENCE_S, "check_same_thread": False}}
    if _file_of(address) is None:
        options["poolclass"] = StaticPool
    engine = create_engine(address, **options)
    event.listen(engine, "connect", _sqlite_settings)
    return engine


def _read_only(address: URL, file: Path) -> Engine:
    """Open a read-only file; if an earlier version wrote it, open a migrated copy instead."""
    source = ReadOnlyFile(file.absolute(), timeout_s=_PATIENCE_S)
    url = address.render_as_string(hide_password=False)
    engine = source.engine(address)
    with user_errors(engine), engine.connect() as connection:
        version = _version(connection, url)
    if version is None or version >= VERSION:
        with user_errors(engine), engine.connect() as connection:
            _bring_up_to_date(connection, url)
        return engine
    copy = _sqlite(address.set(database=str(source.changeable_copy())))
    with user_errors(copy), copy.connect() as connection:
        _bring_up_to_date(connection, url)
    copy.dispose()
    forbid_writing(copy)
    weakref.finalize(copy, source.close)
    return copy


def forbid_writing(engine: Engine) -> None:
    """Make all connections that the engine opens from now on read-only."""
    sqlite = engine.dialect.name == "sqlite"
    event.listen(engine, "connect", _sqlite_reads if sqlite else _postgresql_reads)


def _sqlite_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _postgresql_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()


def _postgresql(address: URL) -> Engine:
    if address.drivername == "postgresql":
        address = address.set(drivername="postgresql+psycopg")
    wanted = address.query.get("options")
    options = f"{_POSTGRESQL['options']} {wanted or ''}".strip()
    try:
        return create_engine(
            address.difference_update_query(["options"]),
            connect_args={**_POSTGRESQL, "options": options},
            pool_pre_ping=True,
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise MissingExtraError("psycopg", extra="postgresql") from error


@contextmanager
def user_errors(engine: Engine) -> Iterator[None]:
    """Turn database errors within the context into errors that say how to fix them."""
    try:
        yield
    except IntegrityError:
        raise
    except DatabaseError as error:
        url = engine.url.render_as_string(hide_password=False)
        said = str(error.orig).strip()
        safe = redact(said, url=url)
        # Do not chain an error that quotes the password: a traceback would show it.
        cause = error if redact(str(error), url=url) == str(error) else None
        found = refusal(error, said=safe, where=redact_url(url), role=engine.url.username)
        if found is None:
            found = _in_words(error, said=said, safe=safe, where=redact_url(url))
        if found is None:
            raise
        raise found from cause


def fetch(engine: Engine, query: Executable) -> Sequence[Any]:
    """Return the rows of one query; database errors become errors that users understand."""
    with user_errors(engine), engine.connect() as connection:
        return connection.execute(query).all()


@contextmanager
def consistent_read(engine: Engine) -> Iterator[Connection]:
    """Provide a connection whose queries all see the database as it was at one moment.

    Use it to read tables that refer to each other: other processes write between two queries.
    """
    with user_errors(engine), engine.connect() as connection:
        if connection.dialect.name != "sqlite":
            connection.execution_options(isolation_level="REPEATABLE READ")
        elif not isinstance(engine.pool, StaticPool):  # no other process sees one in memory
            # Python's driver begins a transaction only before it writes.
            connection.exec_driver_sql("BEGIN")
        yield connection


_DAMAGED = ("not a database", "malformed", "no such table", "no such column")
"""What SQLite says of a file that is no database, or one whose tables were changed."""


def _in_words(error: DatabaseError, *, said: str, safe: str, where: str) -> StoreError | None:
    """Return the error that users see for a database error; None to raise the original."""
    if _is_passing(error):
        return StoreUnreachableError(
            f"{where} does not answer: {safe}; see that it runs and can be reached, and that the "
            "address has the right user, password and database, then run again: a study goes on "
            "where it is"
        )
    if any(each in said for each in _DAMAGED):
        return StoreError(
            f"{where} is damaged or not a thrifty database ({safe}); move it away, or "
            "restore a copy"
        )
    mend = _mend(said)
    return None if mend is None else StoreWriteError(f"cannot write to {where}: {safe}; {mend}")


def _mend(said: str) -> str | None:
    """Return what the user can do about a database's message, or None."""
    if "full" in said or "No space left" in said:
        return "free some disk space and run the study again: it goes on where it is"
    if any(word in said for word in ("readonly", "read-only", "unable to open", "denied")):
        return "choose a writable place with storage=..."
    if "locked" in said:
        return "another program has held the database for half a minute; close it and run again"
    return None


def _is_passing(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", "")  # SQLite's errors have none
    return isinstance(error, OperationalError) and (
        state is None or state[:5] in _PASSING or state[:2] in _PASSING
    )


def _alone(connection: Connection) -> AbstractContextManager[object]:
    """Return a context in which, on PostgreSQL, no other process creates tables."""
    if connection.dialect.name == "sqlite":
        return nullcontext()
    return _advisory_lock(connection)


@contextmanager
def _advisory_lock(connection: Connection) -> Iterator[None]:
    key = int.from_bytes(b"thrifty", "big")
    connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
    connection.commit()
    try:
        yield
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": key})
        connection.commit()


def _check_file(path: Path, *, create: bool) -> None:
    try:
        if path.exists():
            return
    except OSError as error:
        raise StoreError(
            f"cannot look for the database {path}: {error.strerror}; ask its owner, or name another"
        ) from error
    if not create:
        raise StudyNotFoundError(
            f"there is no database {path}; run a study first, or name another with "
            "--storage sqlite:///FILE"
        )
    try:
        is_new = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_new:
            logger.info("made the folder %s for the database %s", path.parent, path.name)
    except OSError as error:
        raise StoreWriteError(
            f"cannot make the folder {path.parent} for the database: {error.strerror}; "
            "choose another place"
        ) from error


def _sqlite_settings(connection: Any, record: object) -> None:  # noqa: ARG001
    cursor = connection.cursor()
    # With WAL, readers never wait for the writer. With FULL, a committed record survives a power
    # cut.
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _use_wal(cursor: Any) -> None:
    """Switch the journal to a write-ahead log, if the database can have one."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            # For this one statement SQLite does not wait for another process that runs it, too.
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _bring_up_to_date(connection: Connection, url: str) -> None:
    version = _version(connection, url)
    if version == VERSION:
        return
    if version is not None and version > VERSION:
        raise StoreVersionError(
            f"{redact_url(url)} was written by a newer thrifty (schema {version}; this one "
            f"knows {VERSION}); "
            "upgrade with: pip install --upgrade thrifty"
        )
    if connection.dialect.name == "sqlite":
        # Of several processes that find no tables, or old ones, only one may change them. On
        # PostgreSQL an advisory lock ensures that.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        version = _version(connection, url)
        if version == VERSION:
            return
    if version is None:
        # A new database needs no migration, so do not wait for the slow import of Alembic. A test
        # ensures that both ways make the same tables.
        metadata.create_all(connection)
        connection.execute(insert(version_table).values(version_num=VERSION))
    else:
        import_module("thrifty.store.migrations").upgrade(connection)
    connection.commit()


def _version(connection: Connection, url: str) -> str | None:
    try:
        return _selected_version(connection)
    except DatabaseError as error:
        if _is_passing(error):
            raise
        if connection.dialect.name != "sqlite":
            connection.rollback()  # PostgreSQL rejects all statements after an error
        names = inspect(connection).get_table_names()
        if version_table.name in names:  # another process has made the tables just now
            return _selected_version(connection)
        if names:
            raise StoreError(
                f"{redact_url(url)} is another program's database; name a new one"
            ) from error
        return None


def _selected_version(connection: Connection) -> str | None:
    found: str | None = connection.execute(text("SELECT version_num FROM thrifty_version")).scalar()
    return found
