"""The store's conformance suite on both databases, and what only PostgreSQL does."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Inspector, inspect

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from thrifty.core import MissingExtraError, StoreUnreachableError, UsageError
from thrifty.store import Store, _engine, redact_url
from thrifty.testing import STORE_CHECKS


pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    return request.getfixturevalue("postgresql")


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, url):
    check(url)


@needs_postgresql
def test_an_address_without_a_driver_is_enough(postgresql):  # noqa: F811
    with Store.open(postgresql.replace("+psycopg", "")) as store:
        assert store.studies.list() == []


@needs_postgresql
def test_a_schema_of_ones_own(postgresql):  # noqa: F811
    with Store.open(postgresql) as store, store._engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA team")
    with Store.open(f"{postgresql}&options=-csearch_path%3Dteam") as store:
        assert "studies" in inspect(store._engine).get_table_names(schema="team")


def test_many_may_open_a_new_database_at_once(url):
    def opened(_: int) -> int:
        with Store.open(url) as store:
            return len(store.studies.list())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [0] * 8


def test_tables_that_another_process_makes_meanwhile_are_ours(tmp_path, monkeypatch):
    """The other process commits between the question for the version and that for the tables."""
    url = f"sqlite:///{tmp_path}/t.db"
    names = Inspector.get_table_names

    def after_the_other(self, *args, **options):
        monkeypatch.undo()
        Store.open(url).close()
        return names(self, *args, **options)

    monkeypatch.setattr(Inspector, "get_table_names", after_the_other)
    with Store.open(url) as store:
        assert store.studies.list() == []


class Cursor:
    """Cursor that reports a locked database a given number of times."""

    def __init__(self, refusals: int, said: str = "database is locked") -> None:
        self.left, self.said = refusals, said

    def execute(self, statement: str) -> None:
        self.left -= 1
        if self.left >= 0:
            raise sqlite3.OperationalError(self.said)


def test_the_first_to_open_a_file_may_keep_others_waiting(monkeypatch):
    cursor = Cursor(3)
    _engine._use_wal(cursor)
    assert cursor.left == -1
    with pytest.raises(sqlite3.OperationalError, match="read"):
        _engine._use_wal(Cursor(1, "disk I/O error: cannot read"))
    monkeypatch.setattr(_engine, "_PATIENCE_S", -1.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        _engine._use_wal(Cursor(1))


def test_a_server_that_is_not_there(tmp_path):
    url = f"postgresql+psycopg://me:secret@/none?host={tmp_path}"
    with pytest.raises(StoreUnreachableError, match="does not answer") as raised:
        Store.open(url)
    assert "secret" not in str(raised.value)


def test_a_database_that_is_not_known():
    with pytest.raises(UsageError, match=r"'mysql'.*postgresql\+psycopg"):
        Store.open("mysql://host/name")


def test_a_driver_that_is_not_installed():
    with pytest.raises(MissingExtraError, match=r"thrifty\[postgresql\]"):
        Store.open("postgresql+asyncmy://host/name")


def test_passwords_are_not_shown():
    assert "secret" not in redact_url("postgresql://me:secret@host/name")
