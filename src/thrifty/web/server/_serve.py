"""Serving the dashboard: listening address and access token."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import UsageError, require


if TYPE_CHECKING:
    from fastapi import FastAPI


PORT = 8550
_SHORTEST_TOKEN = 16
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept.

This is many times the two seconds between the polls of an open page, because polls come late when
training uses the CPU.
"""


def create_app(
    url: str, *, token: str | None = None, only_here: bool = True, patience_s: float = 2.0
) -> FastAPI:
    """Return the dashboard of a database as an ASGI application.

    Args:
        url: Any database address; the database is only read.
        token: Token that clients need; None: every client that can connect may read.
        only_here: Whether to answer only requests for localhost, on any connection.
        patience_s: Maximum age in seconds of a response after the data have changed.

    Raises:
        UsageError: ``url`` is not a database address or is in memory, or the token is too short or
            has other characters.
        StudyNotFoundError: The database file does not exist.
        MissingExtraError: FastAPI is not installed.

    >>> import tempfile
    >>> from starlette.testclient import TestClient
    >>> from thrifty.store import Store
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/t.db"
    >>> Store.open(url).close()
    >>> with TestClient(create_app(url), base_url="http://localhost") as client:
    ...     client.get("/api/studies").json()
    {'studies': []}
    """
    _check_token(token)
    app = _module("fastapi", "thrifty.web._app")
    views = import_module("thrifty.store").Views.open(url)
    cache = import_module("thrifty.web.server._responses").Cache(patience_s=patience_s)
    made: FastAPI = app.application(views, token=token, only_here=only_here, cache=cache)
    return made


@dataclass(kw_only=True)
class Server:
    """A listening dashboard; ``run`` serves until it is stopped.

    Attributes:
        address: URL to open in a browser, including the token if there is one.
    """

    app: FastAPI
    socket: socket.socket
    address: str = field(repr=False)
    _uvicorn: Any = field(default=None, repr=False)

    def run(self) -> None:
        """Serve until Ctrl-C or ``stop``."""
        self._uvicorn.run(sockets=[self.socket])

    def stop(self) -> None:
        """Make ``run`` return; may be called from another thread."""
        self._uvicorn.should_exit = True


def serve(
    url: str, *, host: str = "127.0.0.1", port: int = PORT, token: str | None = None
) -> Server:
    """Return a dashboard of a database that already listens; call its ``run``.

    On any address except this machine's own loopback, clients need the token. One is generated if
    none is given.

    Args:
        url: Any database address; the database is only read.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.
        token: At least 16 letters, digits, ``-``, ``_``, ``.`` or ``~``.

    Raises:
        UsageError: The address or port cannot be used, or for a reason of ``create_app``.
        StudyNotFoundError: The database file does not exist.
        MissingExtraError: FastAPI or uvicorn is not installed.
    """
    uvicorn = _library("uvicorn")
    here = _module("fastapi", "thrifty.web.server._security").is_here(host)
    if token is None and not here:
        token = secrets.token_urlsafe(24)
    app = create_app(url, token=token, only_here=here)
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_module("uvicorn", "thrifty.web.server._connections").Connection,
        ws="none",
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    number = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    query = f"?token={token}" if token else ""
    return Server(
        app=app,
        socket=listening,
        address=f"http://{shown}:{number}/{query}",
        _uvicorn=uvicorn.Server(config),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host!r}: {error.strerror}; give another --host"
        ) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(256)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --port (0: any "
            "that is free)"
        ) from None
    return listening


def _check_token(token: str | None) -> None:
    # The token becomes part of a URL and of a cookie.
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9._~-]{{{_SHORTEST_TOKEN},}}", token):
        raise UsageError(
            f"a token needs at least {_SHORTEST_TOKEN} characters, only letters, digits and - _ . "
            "~; "
            "leave --token out, and one is made up"
        )


def _module(package: str, name: str) -> Any:
    _library(package)
    return import_module(name)


def _library(package: str) -> Any:
    return require(package, extra="web")
