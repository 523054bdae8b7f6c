"""Serving the dashboard: where it listens, and who gets in."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import MissingExtraError, UsageError


if TYPE_CHECKING:
    from fastapi import FastAPI


PORT = 8550
_SHORTEST_TOKEN = 16
_KEEP_ALIVE_S = 75
"""How long a silent connection is kept: many times the two seconds between the questions of an open page, which come late when training has the processor."""


def create_app(
    url: str, *, token: str | None = None, only_here: bool = True, patience_s: float = 2.0
) -> FastAPI:
    """The dashboard of a database as an ASGI application.

    Args:
        url: any database address; it is only read.
        token: what readers must have; None: everybody may read who can connect.
        only_here: answers only to requests for localhost, whatever the connection.
        patience_s: how old an answer may be though there is something new.

    Raises:
        UsageError: not a database address, a database in memory, or a token that is easily guessed.
        StudyNotFoundError: there is no such file.
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
    app = _module("fastapi", "_app")
    views = import_module("thrifty.store").Views.open(url)
    cache = import_module("thrifty.web._cache").Cache(patience_s=patience_s)
    made: FastAPI = app.application(views, token=token, only_here=only_here, cache=cache)
    return made


@dataclass(kw_only=True)
class Server:
    """A dashboard that listens; ``run`` serves until it is stopped.

    Attributes:
        address: what to open in a browser; it contains the token, if there is one.
    """

    app: FastAPI
    socket: socket.socket
    address: str = field(repr=False)
    _uvicorn: Any = field(default=None, repr=False)

    def run(self) -> None:
        """Serves until Ctrl-C or ``stop``."""
        self._uvicorn.run(sockets=[self.socket])

    def stop(self) -> None:
        """Lets ``run`` come to its end; may be called from another thread."""
        self._uvicorn.should_exit = True


def serve(
    url: str, *, host: str = "127.0.0.1", port: int = PORT, token: str | None = None
) -> Server:
    """A dashboard of a database that listens already; call ``run`` on it.

    On any address but this machine's own loopback readers need the token; one is made up if none is given.

    Args:
        url: any database address; it is only read.
        host: the address to listen on.
        port: 0 means any that is free.
        token: at least 16 letters, digits, ``-``, ``_``, ``.`` or ``~``.

    Raises:
        UsageError: an address or port that cannot be listened on, or a reason of ``create_app``.
        StudyNotFoundError: there is no such file.
        MissingExtraError: FastAPI or uvicorn is not installed.
    """
    uvicorn = _library("uvicorn")
    here = _module("fastapi", "_gate").is_here(host)
    if token is None and not here:
        token = secrets.token_urlsafe(24)
    app = create_app(url, token=token, only_here=here)
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_module("uvicorn", "_connections").Connection,
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
            f"cannot listen on {host} port {port}: {error.strerror}; give another --port (0: any that is free)"
        ) from None
    return listening


def _check_token(token: str | None) -> None:
    # it becomes part of an address and of a cookie
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9._~-]{{{_SHORTEST_TOKEN},}}", token):
        raise UsageError(
            f"a token needs at least {_SHORTEST_TOKEN} characters, only letters, digits and - _ . ~; "
            "leave --token out, and one is made up"
        )


def _module(package: str, name: str) -> Any:
    _library(package)
    return import_module(f"thrifty.web.{name}")


def _library(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, extra="web") from None
