from __future__ import annotations

import re
import socket
import sys
import urllib.error
import urllib.request

import pytest

from tests.web.conftest import serving
from thrifty.cli import COMMANDS, main
from thrifty.core import MissingExtraError, StudyNotFoundError, UsageError
from thrifty.web import Server, create_app, serve


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("thrifty.cli.COMMANDS", {*COMMANDS, "dashboard"})


def read(address, path="/api/studies", **headers):
    request = urllib.request.Request(
        address.partition("?")[0].rstrip("/") + path, headers=headers
    )
    with urllib.request.urlopen(request) as response:
        return response.status, response.read()


def test_it_listens_on_the_loopback_without_a_token(database):
    with serving(database) as address:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert read(address)[0] == 200


def test_any_other_address_needs_a_token(database):
    with serving(database, host="0.0.0.0") as address:
        token = re.fullmatch(r"http://0\.0\.0\.0:\d+/\?token=([\w-]{32,})", address)[1]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(address)
        assert read(address, Authorization=f"Bearer {token}")[0] == 200


def test_each_dashboard_has_a_token_of_its_own(database):
    servers = [serve(f"sqlite:///{database}", host="0.0.0.0", port=0) for _ in range(2)]
    for server in servers:
        server.socket.close()
    assert (
        servers[0].address.partition("token=")[2] != servers[1].address.partition("token=")[2]
    )


def test_a_token_on_the_loopback(database):
    with serving(database, token="x" * 16) as address:
        assert address.endswith(f"/?token={'x' * 16}")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(address)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with space " * 3, 'a"b;c' * 5, "ä" * 20]
)
def test_tokens_that_cannot_be(database, token):
    with pytest.raises(UsageError, match="at least 16 characters"):
        create_app(f"sqlite:///{database}", token=token)


def test_a_port_that_is_taken(database):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"cannot listen on 127.0.0.1 port {port}: .*--port"
        ):
            serve(f"sqlite:///{database}", port=port)


def test_a_host_that_is_none(database):
    with pytest.raises(UsageError, match="--host"):
        serve(f"sqlite:///{database}", host="not a host", port=0)


def test_databases_that_cannot_be_shown(tmp_path):
    with pytest.raises(StudyNotFoundError):
        create_app(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(UsageError, match="in memory"):
        create_app("sqlite://")
    with pytest.raises(UsageError, match="not a database address"):
        create_app("nonsense")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_without_the_extra(database, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*thrifty\[web\]"):
        serve(f"sqlite:///{database}", port=0)


def test_the_command(database, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr("os.nice", lambda by: seen.update(nice=by))
    monkeypatch.setattr("webbrowser.open", lambda address: seen.update(opened=address))
    monkeypatch.setattr(Server, "run", lambda self: seen.update(ran=self.socket.close()))
    arguments = ["dashboard", f"sqlite:///{database}", "--port", "0", "--open"]
    monkeypatch.setattr(sys, "argv", ["thrifty", *arguments])
    main()
    said = capsys.readouterr().out
    assert seen["opened"] in said
    assert re.search(r"http://127\.0\.0\.1:\d+/", said)
    assert "ran" in seen
    assert seen["nice"] > 0


def test_the_command_without_a_database(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thrifty", "dashboard"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no database thrifty.db" in capsys.readouterr().err
