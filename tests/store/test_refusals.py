"""A PostgreSQL server that answers, but denies access: which right is missing, and how to get it.

Also the rights that docs/how-to/team.md gives to the members of a team.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.helpers import make_study
from thrifty.cli import _app
from thrifty.core import StoreError, StoreUnreachableError, StoreWriteError
from thrifty.search import GridSearch
from thrifty.store import Store
from thrifty.store._address import refusal
from thrifty.study import Storage


pytestmark = pytest.mark.slow


def execute(url, *statements):
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def role(url, name, *, password=""):
    """Make a role, and return the address by which it uses a database."""
    execute(url, f"DROP OWNED BY {name}" if exists(url, name) else f"CREATE ROLE {name} LOGIN")
    secret = f":{password}" if password else ""
    return url.replace("//thrifty@", f"//{name}{secret}@")


def exists(url, name):
    engine = create_engine(url)
    with engine.connect() as connection:
        query = f"SELECT 1 FROM pg_roles WHERE rolname = '{name}'"
        found = connection.exec_driver_sql(query).scalar()
    engine.dispose()
    return found is not None


@pytest.fixture
def passwords(server):  # noqa: F811
    """Let the server ask all but its owner for a password."""
    rules = server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("local all thrifty trust\nlocal all eve reject\nlocal all all scram-sha-256\n")
    execute(server.url, "SELECT pg_reload_conf()")
    yield
    rules.write_text(before)
    execute(server.url, "SELECT pg_reload_conf()")


@needs_postgresql
@pytest.mark.usefixtures("passwords")
def test_a_wrong_password_is_no_silent_server(postgresql):  # noqa: F811
    url = role(postgresql, "ann", password="wrong")
    with pytest.raises(StoreError, match=r"cannot log in .*password is missing or wrong") as raised:
        Store.open(url)
    assert not isinstance(raised.value, StoreUnreachableError)
    assert "PASSWORD@HOST" in str(raised.value)
    assert "wrong@" not in str(raised.value)
    with pytest.raises(StoreError, match=r"the password is missing or wrong.*\.pgpass"):
        Store.open(url.replace(":wrong", ""))


@needs_postgresql
@pytest.mark.usefixtures("passwords")
def test_a_user_that_the_server_does_not_admit(postgresql):  # noqa: F811
    with pytest.raises(StoreError, match=r"refuses this user; check the user in the address"):
        Store.open(role(postgresql, "eve"))


@needs_postgresql
def test_a_role_that_does_not_exist(postgresql):  # noqa: F811
    with pytest.raises(StoreError, match=r'"missing_role" does not exist; the server refuses'):
        Store.open(postgresql.replace("//thrifty@", "//missing_role@"))


@needs_postgresql
def test_a_database_that_does_not_exist(server):  # noqa: F811
    url = server.url.replace("/postgres?", "/nowhere?")
    with pytest.raises(StoreError, match=r"no database of this name.*createdb -h HOST") as raised:
        Store.open(url)
    assert not isinstance(raised.value, StoreUnreachableError)


@needs_postgresql
def test_a_database_that_a_role_must_not_connect_to(postgresql):  # noqa: F811
    url = role(postgresql, "ann")
    name = re.search("/([a-z0-9]+)[?]", postgresql)[1]
    execute(postgresql, f"REVOKE CONNECT ON DATABASE {name} FROM public")
    with pytest.raises(StoreError, match=r'GRANT CONNECT ON DATABASE NAME TO "ann"'):
        Store.open(url)


@needs_postgresql
def test_a_role_that_may_not_make_the_tables(postgresql):  # noqa: F811
    url = role(postgresql, "ann")
    with pytest.raises(StoreWriteError, match=r'GRANT CREATE ON SCHEMA public TO "ann"'):
        Store.open(url)


def study(url, folder, *, name):
    storage = Storage(url=url, checkpoints=str(folder))
    return make_study(folder, name=name, storage=storage, algorithm=GridSearch(max_epochs=6))


@needs_postgresql
def test_rights_on_tables(postgresql, tmp_path):  # noqa: F811
    study(postgresql, tmp_path, name="owner").run(progress=False)
    url = role(postgresql, "ann")
    with pytest.raises(StoreError, match=r'denies a right.*GRANT SELECT ON ALL .* TO "ann"') as no:
        Store.open(url)
    assert not isinstance(no.value, StoreWriteError)
    grants = [
        sql.replace("readers", "ann").replace("members", "ann")
        for sql in re.findall("^GRANT .*(?=;$)", TEAM_PAGE, flags=re.MULTILINE)
        if " ON " in sql
    ]
    reading = [sql for sql in grants if "GRANT SELECT ON" in sql]
    assert len(grants) > len(reading) > 0
    execute(postgresql, *reading)
    assert "owner" in CliRunner().invoke(_app, ["status", "--storage", url]).output
    with pytest.raises(StoreWriteError, match=r"INSERT, UPDATE, DELETE ON ALL TABLES"):
        study(url, tmp_path, name="ann").run(progress=False)
    execute(postgresql, *grants)
    study(url, tmp_path, name="ann").run(progress=False)
    assert CliRunner().invoke(_app, ["delete", "owner", "--yes", "--storage", url]).exit_code == 0
    assert CliRunner().invoke(_app, ["gc", "--storage", url]).exit_code == 0


TEAM_PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "team.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "the database system is starting up",
        "too many clients already",
        'too many connections for role "ann"',
        'root certificate file "root.crt" does not exist',
    ],
)
def test_a_server_that_is_only_busy_is_no_refusal(text):
    error = Exception(f"connection failed: FATAL: {text}")
    error.sqlstate = None
    wrapped = OperationalError(None, None, error)
    assert refusal(wrapped, said=str(error), where="here", role=None) is None


def test_names_of_roles_are_quoted():
    error = Exception("permission denied for table studies")
    error.sqlstate = "42501"
    found = refusal(OperationalError("SELECT 1", None, error), said="no", where="", role='a"b')
    assert 'TO "a""b"' in str(found)
