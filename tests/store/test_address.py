"""Passwords in addresses appear in no message, repr, traceback or log."""

from __future__ import annotations

import contextlib
import logging
import traceback
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError

from tests.study.helpers import make_study
from thrifty.cli import _app
from thrifty.cli._doctor import findings
from thrifty.core import CheckpointError, CheckpointRef, StoreUnreachableError, UsageError
from thrifty.store import CheckpointFolder, Store, Views, redact_url
from thrifty.store._address import read_address
from thrifty.study import Storage


pytestmark = pytest.mark.slow


SECRET = "hunter2xyz"
PARTS = ("hunter2xyz", "hunter2", "xyz")

ADDRESSES = [
    "postgresql+psycopg://me:hunter2xyz@/db?host={folder}",
    "postgresql://me:hunter2xyz@/db?host={folder}",
    "postgresql+psycopg://me:hunter2@xyz@localhost:1/db",
    "postgresql+psycopg://me:hunter2@x/y:xyz@localhost:1/db",
    "postgresql+psycopg://me:hunter2/xyz@/db?host={folder}",
    "postgresql+psycopg://me:hunter2?xyz@/db?host={folder}",
    "postgresql+psycopg://me:hunter2#xyz@/db?host={folder}",
    "postgresql+psycopg://me:hunter2%40xyz@/db?host={folder}",
    "postgresql+psycopg://me@/db?host={folder}&password=hunter2xyz",
    "postgresql+psycopg://me@/db?host={folder}&sslpassword=hunter2xyz",
    "postgresql+psycopg://me@/db?host={folder}&sslkey=/k&PASSWORD=hunter2xyz",
    "postgresql+psycopg://me@corp:hunter2xyz@/db?host={folder}",
    "postgresql+psycopg://me:hunter2xyz",
    "postgresql+psycopg://me:hunter2xyz/db",
    "postgresql:me:hunter2xyz@localhost/db",
    "postgresql:me:hunter2xyz",
    "me:hunter2xyz@localhost/db",
    "mysql://me:hunter2xyz@localhost/db",
    "mysql+nothing://me:hunter2@xyz@localhost/db",
    "sqlite://me:hunter2xyz@localhost/t.db",
    "://me:hunter2xyz@localhost/db",
    "postgresql+psycopg://:hunter2xyz@/db?host={folder}",
]


@pytest.fixture(params=ADDRESSES)
def address(request, tmp_path):
    return request.param.format(folder=tmp_path)


def clean(text: str) -> bool:
    return not any(part in text for part in PARTS)


def all_of(error: BaseException) -> str:
    """Return all that a terminal shows of an error: its message, its causes and its repr."""
    return "".join(traceback.format_exception(error)) + repr(error)


def test_no_address_shows_its_password(address):
    assert clean(redact_url(address))


@pytest.mark.parametrize("open_it", [Store.open, Views.open], ids=["store", "views"])
def test_no_error_of_a_database_shows_it(address, open_it, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with (
        caplog.at_level(logging.DEBUG, logger="thrifty"),
        pytest.raises(Exception) as raised,  # noqa: PT011
    ):
        open_it(address)
    source = "".join(line for line in all_of(raised.value).splitlines() if "pytest" not in line)
    assert clean(source)
    assert clean(caplog.text)


def test_no_repr_shows_it(address, tmp_path):
    storage = Storage(url=address, checkpoints=f"ftp://me:{SECRET}@localhost/dir")
    assert clean(repr(storage))
    assert clean(repr(make_study(tmp_path, storage=storage)))


def test_no_notebook_shows_it(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = make_study(tmp_path, storage=address)
    try:
        text = study._repr_html_()
    except DatabaseError as error:  # the driver names an option that it does not know
        text = str(error)
    assert clean(text)


@pytest.mark.parametrize(
    "command", ["status", "best s", "export s --format csv", "resume s", "dashboard"]
)
def test_no_command_shows_it(address, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command.split()
    given = [address] if words == ["dashboard"] else ["--storage", address]
    result = CliRunner().invoke(_app, [*words, *given])
    assert result.exit_code != 0
    assert clean(result.output)
    assert clean(all_of(result.exception))


def test_the_doctor_does_not_show_it(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thrifty.cli._doctor._extras", lambda asked: iter(()))
    monkeypatch.setattr("thrifty.cli._doctor._step", lambda *_: ("ok", ""))
    found = findings(storage=address, extras=(), device=None)
    assert clean(str(list(found)))


def test_what_is_not_secret_stays():
    for url in (
        "sqlite:///thrifty.db",
        "sqlite:////data/a:b@c.db",
        "postgresql+psycopg://me@host:5432/db?sslmode=require&passfile=/me/pass",
        "postgresql://[::1]:5432,other:5433/db",
        "s3://bucket/folder",
        "thrifty.db",
    ):
        assert redact_url(url) == url


def test_an_address_that_was_cleaned_stays_as_it_is(address):
    assert redact_url(redact_url(address)) == redact_url(address)


def test_where_a_password_is_not_escaped_the_mend_is_said():
    with pytest.raises(UsageError, match="write each @ of the password as %40"):
        read_address("postgresql://me:se@cret@host/db")
    with pytest.raises(UsageError, match="as %40 %3A"):
        read_address("postgresql://me:secret")
    with pytest.raises(UsageError, match="not a database address"):
        read_address(5)
    assert read_address("postgresql://me:se%40cret@host/a%40b").password == "se@cret"


passwords = st.text(st.sampled_from("abcdefghijkXYZ019@:/?#%&=+. ;"), min_size=4, max_size=12).map(
    lambda text: f"Q{text}Q"
)


@given(passwords, st.booleans())
def test_no_password_survives(password, in_query):
    """No part of a password survives: each text between two special characters is hidden."""
    url = (
        f"postgresql://me@h/d?password={password}"
        if in_query
        else f"postgresql://me:{password}@h/d"
    )
    assert "Q" not in redact_url(url)


@given(passwords)
def test_what_sqlalchemy_takes_for_a_password_is_hidden(password):
    url = f"postgresql://me:{password}@h/d"
    with contextlib.suppress(ArgumentError, ValueError):
        held = make_url(url).password
        assert str(held) not in redact_url(url).partition("://")[2]


@pytest.mark.parametrize("password", [SECRET, "hunter2%2Fxyz"])
def test_a_driver_that_quotes_the_password_is_not_quoted(monkeypatch, password):
    def refuse(**options):
        raise psycopg.OperationalError(f"missing = after {options['password']!r}")

    monkeypatch.setattr(psycopg, "connect", refuse)
    url = f"postgresql+psycopg://me:{password}@host/db"
    with pytest.raises(StoreUnreachableError, match=r"missing = after '\*\*\*'") as raised:
        Store.open(url)
    assert clean(all_of(raised.value))


def test_checkpoints_do_not_show_the_password_of_their_address(monkeypatch, tmp_path):
    root = f"memory://me:{SECRET}@host/dir"
    folder = CheckpointFolder(root)
    ref = CheckpointRef(node=0, epoch=1, path="plan/0-1.safetensors", num_bytes=1, digest="")
    with pytest.raises(CheckpointError) as raised:
        folder.read(ref)
    assert clean(all_of(raised.value))
    with pytest.raises(UsageError, match="cannot be kept at nothing://me") as unknown:
        CheckpointFolder(f"nothing://me:{SECRET}@host/dir")
    assert clean(str(unknown.value))


@pytest.mark.parametrize(
    ("path", "meant"),
    [("digits.db", "sqlite:///digits.db"), ("/data/my digits.db", "sqlite:////data/my digits.db")],
)
def test_a_path_is_quoted_with_the_address_that_was_meant(path, meant):
    for address in (path, Path(path)):
        with pytest.raises(UsageError) as error:
            read_address(address)
        assert str(error.value) == f"{path!r} is not a database address; did you mean {meant}?"


@pytest.mark.parametrize(
    "address", ["me:hunter2xyz@host", "host=here password=hunter2xyz", "here?password=hunter2xyz"]
)
def test_what_may_have_a_password_is_not_quoted(address):
    with pytest.raises(UsageError, match="that is not a database address") as error:
        read_address(address)
    assert "hunter2xyz" not in str(error.value)
