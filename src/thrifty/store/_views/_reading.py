"""Connections that cannot write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from thrifty.store._engine import user_errors


def forbid_writing(engine: Engine) -> None:
    """Connections that the engine opens from now on only read."""
    sqlite = engine.dialect.name == "sqlite"
    event.listen(engine, "connect", _sqlite_reads if sqlite else _postgresql_reads)


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection for a moment, with errors that users can read."""
    with user_errors(engine), engine.connect() as connection:
        yield connection


def _sqlite_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _postgresql_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()
