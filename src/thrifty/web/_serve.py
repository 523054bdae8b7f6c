"""Serving the dashboard: listening address, access token, connections with time limits.

A connection is closed if it sends no request, sends one too slowly, or does not read the response.
A few slow or hostile clients therefore cannot lock out the others."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from thrifty.core import UsageError, require


if TYPE_CHECKING:
    from fastapi import FastAPI


REQUEST_S = 10.0
"""Maximum seconds for a whole request, from its first byte or the start of its connection."""
ANSWER_S = 60.0
"""Maximum seconds for a response to be made and read."""
MOST = 512
"""Maximum number of connections. Beyond it, the longest-idle ones are closed."""


class Connection(H11Protocol):
    """A uvicorn connection with time limits."""

    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    _quiet_since = 0.0

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Register a new connection; beyond the maximum, close another one or reject it."""
        super().connection_made(transport)
        self._quiet_since = time.monotonic()
        if len(self.connections) > MOST and not self._find_room():
            transport.abort()
            return
        self._limit("request")

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the timer of a closed connection."""
        self._limit("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request, or several requests."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Set the next time limit after a response; part of the next request may have arrived."""
        super().on_response_complete()
        self._quiet_since = time.monotonic()
        self._watch()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Choose the time limit for the connection's current state."""
        if self.transport.is_closing():
            self._limit("")
        elif not self.is_quiet:
            self._limit("answer")
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # uvicorn's own limit for idle connections applies, unless this one has sent no request
            # yet.
            self._limit("request" if self.cycle is None else "")
        else:
            self._limit("request")

    def _limit(self, what: str) -> None:
        if what == self._limited:
            return
        self._limited = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what:
            after_s = REQUEST_S if what == "request" else ANSWER_S
            self._timer = self.loop.call_later(after_s, self.transport.abort)

    def _find_room(self) -> bool:
        """Close the connection that has been idle longest; return False if all others are busy."""
        quiet = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and each.is_quiet
        ]
        if not quiet:
            return False
        min(quiet, key=lambda each: each._quiet_since).transport.abort()
        return True


PORT = 8550
_SHORTEST_TOKEN = 16
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept.

This is many times the two seconds between the polls of an open page, because polls come late when
training uses the CPU.
"""


def create_app(
    url: str,
    *,
    token: str | None = None,
    local_only: bool = True,
    patience_s: float = 2.0,
    steer: bool = False,
    checkpoints: str | None = None,
) -> FastAPI:
    """Return the dashboard of a database as an ASGI application.

    Args:
        url: Any database address; the database is only read.
        token: Token that clients need; None: every client that can connect may read.
        local_only: Whether to answer only requests for localhost, on any connection.
        patience_s: Maximum age in seconds of a response after the data have changed.
        steer: Whether readers may stop studies and trials, and write notes and tags.
        checkpoints: Folder or address of the checkpoints, with the artifacts of trials (default:
            beside the database).

    Raises:
        UsageError: ``url`` is not a database address or is in memory, the token is too short or
            has other characters, or readers may steer without one.
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
    if steer and token is None:
        raise UsageError("a dashboard that may steer studies needs a token, also on this machine")
    app = _module("fastapi", "thrifty.web._app")
    views = import_module("thrifty.store").Views.open(url)
    cache = import_module("thrifty.web._responses").Cache(patience_s=patience_s)
    acts = import_module("thrifty.web._steering_routes").Steering(url) if steer else None
    store = import_module("thrifty.store._store")
    root = store.default_checkpoints(url) if checkpoints is None else checkpoints
    made: FastAPI = app.application(
        views,
        token=token,
        local_only=local_only,
        cache=cache,
        steering=acts,
        checkpoints=partial(store.CheckpointFolder, root),
    )
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
    url: str,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    steer: bool = False,
    checkpoints: str | None = None,
) -> Server:
    """Return a dashboard of a database that already listens; call its ``run``.

    On any address except this machine's own loopback, and to steer, clients need the token. One is
    generated if none is given.

    Args:
        url: Any database address; the database is only read, unless ``steer`` is set.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.
        token: At least 16 letters, digits, ``-``, ``_``, ``.`` or ``~``.
        steer: Whether readers may stop studies and trials, and write notes and tags.
        checkpoints: As in ``create_app``.

    Raises:
        UsageError: The address or port cannot be used, or for a reason of ``create_app``.
        StudyNotFoundError: The database file does not exist.
        MissingExtraError: FastAPI or uvicorn is not installed.
    """
    uvicorn = _library("uvicorn")
    here = _module("fastapi", "thrifty.web._app").is_here(host)
    if token is None and (steer or not here):
        token = secrets.token_urlsafe(24)
    app = create_app(url, token=token, local_only=here, steer=steer, checkpoints=checkpoints)
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_module("uvicorn", "thrifty.web._serve").Connection,
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
