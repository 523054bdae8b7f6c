from __future__ import annotations

import contextlib
import http.client
import re
import socket
import sys
import threading
import urllib.error
import urllib.request

import pytest

from tests.web.conftest import serving
from thrifty.cli import main
from thrifty.core import MissingExtraError, StudyNotFoundError, UsageError
from thrifty.web import Server, _serve, create_app, serve


pytestmark = pytest.mark.slow


def read(address, path="/api/studies", **headers):
    request = urllib.request.Request(address.partition("?")[0].rstrip("/") + path, headers=headers)
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
    assert servers[0].address.partition("token=")[2] != servers[1].address.partition("token=")[2]


def test_a_token_on_the_loopback(database):
    with serving(database, token="x" * 16) as address:
        assert address.endswith(f"/?token={'x' * 16}")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(address)


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "with space " * 3, 'a"b;c' * 5, "ä" * 20])
def test_tokens_that_cannot_be(database, token):
    with pytest.raises(UsageError, match="at least 16 characters"):
        create_app(f"sqlite:///{database}", token=token)


def test_a_port_that_is_taken(database):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1 port {port}: .*--port"):
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
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*\.\[web\]"):
        serve(f"sqlite:///{database}", port=0)


def test_the_command_serves_politely_and_opens_the_browser(database, monkeypatch, capsys):
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


@pytest.mark.parametrize("way", ["argument", "option", "environment"])
def test_the_command_takes_the_address_as_other_commands_do(database, monkeypatch, way):
    monkeypatch.setattr("os.nice", lambda by: None)
    monkeypatch.setattr(Server, "run", lambda self: self.socket.close())
    url = f"sqlite:///{database}"
    words = {"argument": [url], "option": ["--storage", url], "environment": []}[way]
    if way == "environment":
        monkeypatch.setenv("THRIFTY_STORAGE", url)
    monkeypatch.setattr(sys, "argv", ["thrifty", "dashboard", "--port", "0", *words])
    main()


def test_the_command_with_two_addresses(monkeypatch, capsys):
    arguments = ["dashboard", "sqlite:///a.db", "--storage", "postgresql://me:secret@h/b"]
    monkeypatch.setattr(sys, "argv", ["thrifty", *arguments])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "has two addresses" in said
    assert "secret" not in said


def test_ctrl_c_ends_the_command_as_it_ends_others(database, monkeypatch):
    def interrupted(self):
        self.socket.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("os.nice", lambda by: None)
    monkeypatch.setattr(Server, "run", interrupted)
    arguments = ["dashboard", f"sqlite:///{database}", "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["thrifty", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 130


def test_the_command_without_a_database(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thrifty", "dashboard"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no database thrifty.db" in capsys.readouterr().err


# -- slow and hostile readers ------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch):
    """Shorten the time limits of connections to an instant.

    A test that also serves honest clients makes them longer again first: on a busy machine, an
    answer takes longer than that.
    """
    monkeypatch.setattr(_serve, "REQUEST_S", 0.2)
    monkeypatch.setattr(_serve, "ANSWER_S", 0.2)
    return monkeypatch


def connected(address) -> socket.socket:
    port = int(address.rpartition(":")[2].strip("/"))
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.fixture
def made(monkeypatch):
    """Record the connections of a server, as it sees them."""
    found = []
    begin = _serve.Connection.connection_made

    def note(self, transport):
        begin(self, transport)
        found.append(self)

    monkeypatch.setattr(_serve.Connection, "connection_made", note)
    return found


@pytest.fixture
def lost(monkeypatch):
    """Return an event that is set when a connection has ended."""
    event = threading.Event()
    end = _serve.Connection.connection_lost

    def note(self, error):
        end(self, error)
        event.set()

    monkeypatch.setattr(_serve.Connection, "connection_lost", note)
    return event


ASK = b"GET /api/studies HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"G",
        b"GET /api/studies HTTP/1.1\r\n",
        ASK,
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1",
    ],
    ids=["nothing", "a letter", "a line", "no end", "no body"],
)
def test_who_does_not_finish_its_request_is_cut_off(database, hurried, begin):
    with serving(database) as address, connected(address) as slow:
        slow.sendall(begin)
        assert is_closed(slow)


def test_a_letter_now_and_then_is_no_excuse(database, hurried):
    with serving(database) as address, connected(address) as slow:
        slow.settimeout(0.01)
        with pytest.raises(ConnectionError):
            drip(slow, ASK * 1000)


def drip(connection: socket.socket, data: bytes) -> None:
    """Send a byte, wait for an answer, then send the next byte."""
    for at in range(len(data)):
        connection.sendall(data[at : at + 1])
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1):
                raise ConnectionResetError


def test_the_second_request_of_a_connection_has_a_limit_too(database, hurried):
    with serving(database) as address, connected(address) as slow:
        slow.sendall(ASK + b"\r\n" + b"GET /api")
        assert is_closed(slow)


def test_who_does_not_read_is_cut_off(database, hurried, made, lost):
    with serving(database) as address, connected(address) as slow:
        path = b"/static/vendor/echarts.min.js"
        slow.sendall((b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") * 50)
        assert lost.wait(60)
        hurried.setattr(_serve, "REQUEST_S", 60.0)
        hurried.setattr(_serve, "ANSWER_S", 60.0)
        assert read(address)[0] == 200


def test_who_has_asked_may_wait_before_it_asks_again(database, made, lost):
    with serving(database) as address, connected(address) as page:
        for _ in range(2):
            page.sendall(ASK + b"\r\n")
            answer = http.client.HTTPResponse(page)  # read the whole answer: it comes in parts
            answer.begin()
            assert answer.status == 200
            answer.read()
            while made[0]._limited:
                assert not lost.wait(0.01)


def test_with_too_many_connections_the_quiet_ones_go(database, monkeypatch):
    monkeypatch.setattr(_serve, "MOST", 4)
    with serving(database) as address:
        idle = [connected(address) for _ in range(12)]
        assert read(address)[0] == 200
        for connection in idle[:8]:
            assert is_closed(connection)
        for connection in idle:
            connection.close()


def test_there_is_no_room_while_all_are_at_work(database, monkeypatch):
    monkeypatch.setattr(_serve, "MOST", 2)
    monkeypatch.setattr(_serve.Connection, "is_quiet", property(lambda self: False))
    with serving(database) as address:
        idle = [connected(address) for _ in range(3)]
        assert is_closed(idle[2])
        for connection in idle:
            connection.close()
