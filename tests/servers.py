"""A PostgreSQL server for a test module, empty databases on it, and a proxy that cuts them off."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from bench.common.postgresql import PrivatePostgreSQL, postgresql_programs


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


class FlakyProxy:
    """A proxy from a port of the loopback interface to a socket of this machine.

    Use it as a context manager.

    Attributes:
        port: port that it listens on.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._up = True
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cut()
        # This wakes accept(), which closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def cut(self) -> None:
        """Break all connections; new ones break at once, too."""
        with self._lock:
            self._up = False
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(*pair)

    def mend(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._up = True

    def _serve(self) -> None:
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._up:
                    theirs.close()
                    continue
                ours = socket.socket(socket.AF_UNIX)
                try:
                    ours.connect(str(self._target))
                except OSError:
                    _close(ours, theirs)
                    continue
                self._pairs.append((ours, theirs))
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _close(source, sink)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
