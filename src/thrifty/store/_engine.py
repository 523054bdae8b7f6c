"""Opening a database: the engine, its settings, its version, and errors in the user's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError
from sqlalchemy.pool import StaticPool

from thrifty.core import (
    StoreError,
    StoreVersionError,
    StoreWriteError,
    StudyNotFoundError,
    UsageError,
)

from ._schema import VERSION, metadata, version_table


def open_engine(url: str, *, create: bool) -> Engine:
    """An engine on a database of the present version.

    Raises:
        UsageError: not a database address.
        StudyNotFoundError: there is no such file and ``create`` is False.
        StoreVersionError: a newer thrifty wrote it.
        StoreWriteError: it cannot be written.
    """
    try:
        address = make_url(url)
    except ArgumentError:
        raise UsageError(
            f"{url!r} is not a database address; write sqlite:///thrifty.db or postgresql+psycopg://host/name"
        ) from None
    options: dict[str, Any] = {}
    if address.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": 30.0, "check_same_thread": False}
        if address.database in (None, "", ":memory:"):
            options["poolclass"] = StaticPool
        else:
            _check_file(Path(str(address.database)), create=create)
    engine = create_engine(address, **options)
    if address.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _sqlite_settings)
    with user_errors(engine), engine.connect() as connection:
        _bring_up_to_date(connection, url)
    return engine


@contextmanager
def user_errors(engine: Engine) -> Iterator[None]:
    """What the database refuses becomes an error that says how to mend it."""
    try:
        yield
    except DatabaseError as error:
        where = engine.url.render_as_string()
        said = str(error.orig)
        if "full" in said:
            mend = "free some disk space and run the study again: it goes on where it is"
        elif "readonly" in said or "unable to open" in said or "denied" in said:
            mend = "choose a writable place with storage=..."
        elif "locked" in said:
            mend = "another program has held the database for half a minute; close it and run again"
        elif "not a database" in said or "malformed" in said:
            raise StoreError(
                f"{where} is damaged or not a thrifty database ({said}); move it away, or restore a copy"
            ) from error
        else:
            raise
        raise StoreWriteError(f"cannot write to {where}: {said}; {mend}") from error


def _check_file(path: Path, *, create: bool) -> None:
    if not create and not path.exists():
        raise StudyNotFoundError(
            f"there is no database {path}; run a study first, or name another with --storage sqlite:///FILE"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(
            f"cannot make the folder {path.parent} for the database: {error.strerror}; choose another place"
        ) from error


def _sqlite_settings(connection: Any, record: object) -> None:  # noqa: ARG001
    cursor = connection.cursor()
    # WAL: readers never wait for the writer; FULL: a committed record survives a power cut
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _bring_up_to_date(connection: Connection, url: str) -> None:
    version = _version(connection)
    if version == VERSION:
        return
    if version is not None and version > VERSION:
        raise StoreVersionError(
            f"{url} was written by a newer thrifty (schema {version}; this one knows {VERSION}); "
            "upgrade with: pip install --upgrade thrifty"
        )
    if version is None:
        # nothing to migrate, so no need to wait for Alembic; a test holds the two ways to the same tables
        metadata.create_all(connection)
        connection.execute(insert(version_table).values(version_num=VERSION))
    else:
        import_module("thrifty.store._migrate").upgrade(connection)
    connection.commit()


def _version(connection: Connection) -> str | None:
    try:
        found: str | None = connection.execute(
            text("SELECT version_num FROM thrifty_version")
        ).scalar()
    except (OperationalError, DatabaseError) as error:
        connection.rollback()
        if inspect(connection).get_table_names():
            raise StoreError(
                f"{connection.engine.url.render_as_string()} is another program's database; name a new one"
            ) from error
        return None
    return found
