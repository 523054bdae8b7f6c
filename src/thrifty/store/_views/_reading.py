"""Short-lived connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from thrifty.store._engine import user_errors


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a short-lived connection; database errors become errors that users understand."""
    with user_errors(engine), engine.connect() as connection:
        yield connection
