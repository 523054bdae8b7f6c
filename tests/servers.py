"""A PostgreSQL server for a test module, and empty databases on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from thrifty.testing import PrivatePostgreSQL, postgresql_programs


needs_postgresql = pytest.mark.skipif(
    postgresql_programs() is None,
    reason="PostgreSQL's server is not installed (with Debian: apt-get install postgresql)",
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgreSQL]:
    with PrivatePostgreSQL() as started:
        yield started


@pytest.fixture
def postgresql(server) -> str:
    """Return the address of an empty database."""
    return server.new_database(f"test{next(_numbers)}")
