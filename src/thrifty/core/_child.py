"""Processes of our own, each with a socket that nothing else can reach.

Messages are pickled: both ends are ours, and the sockets are a pair without an address.

Who waits for a child waits for its *process* as well as for its socket: another process that the child
has forked may keep the socket open when the child is long dead. A child ends when its parent does, also
in the middle of a long computation.

Children are forked from a process that has imported what they need (``_fork_server``).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ._fork_server import LOOK_S, MAX_REQUEST, end_with_parent


LAST_WORDS_S = 10.0
"""How long a child that has closed its socket may take to end."""

_SERVER = ("-m", "thrifty.core._fork_server")

_READ_BY_NOBODY = {"PYTEST_CURRENT_TEST"}
"""Variables that change all the time and that no module looks at when it is imported."""

_SHORT = 4
_LONG = 8


class ChildEndedError(Exception):
    """A child process has ended; the message says how."""


class Child:
    """A Python process that runs one of our modules.

    Args:
        module: Its main program; it calls ``parent_of``.
        preload: Modules that it needs and that take long to import; no user code.
    """

    def __init__(self, module: str, *, preload: Sequence[str] = ()) -> None:
        self._server = _server_of_now()
        streams = [
            _stream(number) for number in range(3)
        ]  # before a closed one's number is taken
        ours, theirs = socket.socketpair()
        try:
            self._ticket, self._exit = self._server.start(
                module, preload=preload, files=[theirs.fileno(), *streams]
            )
        finally:
            theirs.close()
            for file in streams:
                os.close(file)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._inbox = bytearray()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._server.pid(self._ticket)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self._exit.is_set()

    def send(self, message: Any) -> None:
        """Send a message. If the child is dead, ``receive`` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def send_bytes(self, message: bytes) -> None:
        """Send bytes; the child reads them with ``recv_bytes``."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def receive(self) -> list[Any]:
        """Return all messages that have come, without waiting.

        Raises:
            ChildEndedError: There are none, and there will be none: the process has ended.
        """
        ended = self._exit.is_set()  # before the last look: what it has sent by then is here
        closed = self._fill()
        messages = list(self._unpacked())
        if not messages and (ended or closed):
            raise ChildEndedError(self._how_it_ended())
        return messages

    def end(self) -> None:
        """End the process now."""
        self._server.end(self._ticket)
        self._exit.wait(None)
        self._exit.close()
        self._connection.close()
        self._socket.close()

    def _how_it_ended(self) -> str:
        if not self._exit.wait(LAST_WORDS_S):
            # It has closed its socket, and something keeps it from ending.
            self._server.end(self._ticket)
            self._exit.wait(None)
        code = self._exit.code
        if code is None:
            self._server.wait()
            return "with the process that it was forked from"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _fill(self) -> bool:
        """Read what is there; say whether the child has closed its end."""
        try:
            while data := self._socket.recv(1 << 20, socket.MSG_DONTWAIT):
                self._inbox += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _unpacked(self) -> Iterator[Any]:
        """Take whole messages out of what has come, as ``Connection.send`` has packed them."""
        while len(self._inbox) >= _SHORT:
            begin, size = _SHORT, int.from_bytes(self._inbox[:_SHORT], "big", signed=True)
            if size == -1:
                begin = _SHORT + _LONG
                size = int.from_bytes(self._inbox[_SHORT:begin], "big")
            if len(self._inbox) < begin + size:
                return
            message = bytes(self._inbox[begin : begin + size])
            del self._inbox[: begin + size]
            yield pickle.loads(message)


def wait_for(children: Iterable[Child], timeout_s: float | None) -> list[Child]:
    """Wait until one of some children has said something or has ended; return those that have."""
    by_handle: dict[Any, Child] = {}
    for child in children:
        by_handle[child._socket] = by_handle[child._exit.handle] = child
    found = [by_handle[handle] for handle in wait(list(by_handle), timeout=timeout_s)]
    return list(dict.fromkeys(found))


class _Exit:
    """The end of a process, told on a pipe that only the fork server writes to: no fork keeps it open."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.code: int | None = None
        """As of ``subprocess``; None before the end, and if the server has ended with it."""
        self._ended = False

    def is_set(self) -> bool:
        return self.wait(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Say whether the process has ended, within a time; None is for ever."""
        if not self._ended and wait([self.handle], timeout=timeout_s):
            self._ended = True
            self.code = json.loads(os.read(self.handle, 100) or "null")
        return self._ended

    def close(self) -> None:
        """Let go of the pipe; the process has ended."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class _Server:
    """The process that children are forked from; threads may share it."""

    def __init__(self) -> None:
        self.made_in = _surroundings()
        self._lock = threading.Lock()
        self._pids: list[int] = []
        self._num_started = 0
        # A message is a request: sent whole, received whole.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        with theirs:
            command = [sys.executable, *_SERVER, str(theirs.fileno()), str(os.getpid())]
            # The kernel ends a child with the thread that has started it; only the main one stays.
            if threading.current_thread() is threading.main_thread():
                command.append("with-thread")
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        # also when the interpreter ends
        weakref.finalize(self, _end_server, self._process, self._requests, os.getpid())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, module: str, *, preload: Sequence[str], files: Sequence[int]
    ) -> tuple[int, _Exit]:
        """Ask for a child; return the number of the request, and the child's end to be.

        Args:
            files: Its socket and its three standard streams.
        """
        reading, writing = os.pipe()
        folder = ""
        with contextlib.suppress(FileNotFoundError):  # it has been removed
            folder = str(Path.cwd())
        request = {"module": module, "preload": list(preload), "folder": folder}
        try:
            with self._lock:
                with contextlib.suppress(OSError):  # it has ended, and the pipe says so
                    data = [json.dumps(request).encode()]
                    socket.send_fds(self._requests, data, [writing, *files])
                self._num_started += 1
                return self._num_started - 1, _Exit(reading)
        finally:
            os.close(writing)

    def pid(self, ticket: int) -> int:
        """Return the number of a child's process.

        Raises:
            ChildEndedError: The server ended before it had started it.
        """
        with self._lock:
            while len(self._pids) <= ticket:
                answer = b""
                with contextlib.suppress(ConnectionError):
                    answer = self._requests.recv(MAX_REQUEST)
                if not answer:
                    raise ChildEndedError("the process that it was to be forked from has ended")
                self._pids.append(json.loads(answer))
        return self._pids[ticket]

    def wait(self) -> None:
        """Wait for its end, which its children's ends have announced."""
        self._process.wait()

    def end(self, ticket: int) -> None:
        """Ask for the end of a child."""
        with contextlib.suppress(OSError), self._lock:
            self._requests.send(json.dumps({"end": ticket}).encode())


_servers: list[_Server] = []
"""The one that is asked; those before it live while somebody holds a child of theirs."""

_servers_lock = threading.Lock()


def _server_of_now() -> _Server:
    """Return a server whose surroundings are those of this process."""
    with _servers_lock:
        if not _servers or not _servers[0].alive or _servers[0].made_in != _surroundings():
            _servers[:] = [_Server()]
        return _servers[0]


def _surroundings() -> dict[str, Any]:
    """What a child has from its parent and the server cannot hand on."""
    environment = {k: v for k, v in os.environ.items() if k not in _READ_BY_NOBODY}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"process": os.getpid(), "environment": environment, "cores": cores}


def _end_server(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    """End a server and its children, unless this process is a fork of its owner."""
    requests.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _stream(number: int) -> int:
    """A copy of a standard stream of this process; of nothing, if it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


def parent_of(arguments: list[str]) -> Connection:
    """Return a child's connection to its parent, and have the child end when the parent does.

    Args:
        arguments: What ``Child`` has put behind the name of the module.
    """
    fd, parent, *rest = arguments
    # Ctrl-C reaches all processes of a terminal; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "with-thread" in rest:
        end_with_parent()
    threading.Thread(
        target=_watch, args=(int(parent),), name="thrifty-parent", daemon=True
    ).start()
    return Connection(int(fd))


def _watch(parent: int) -> None:
    """End this process when its parent is gone; it has another one then."""
    gone = threading.Event()
    while os.getppid() == parent:
        gone.wait(LOOK_S)
    os._exit(1)
