"""Connections for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from thrifty.store._engine import user_errors


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection for a moment, with errors that users can read."""
    with user_errors(engine), engine.connect() as connection:
        yield connection
