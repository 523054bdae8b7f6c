"""Processes of our own, each with a socket that nothing else can reach.

Messages are pickled: both ends are ours, and the sockets are a pair without an address.

Who waits for a child waits for its *process* as well as for its socket: another process that the child
has forked may keep the socket open when the child is long dead. A child ends when its parent does, also
in the middle of a long computation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any


LOOK_S = 1.0
"""How often a child looks whether its parent lives, where the kernel does not tell it."""

LAST_WORDS_S = 10.0
"""How long a child that has closed its socket may take to end."""

_SHORT = 4
_LONG = 8
_PR_SET_PDEATHSIG = 1


class ChildEndedError(Exception):
    """A child process has ended; the message says how."""


class Child:
    """A Python process that runs one of our modules.

    Args:
        module: Its main program; it calls ``serve``.
    """

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
            # The kernel ends a child with the thread that has started it; only the main one stays.
            if threading.current_thread() is threading.main_thread():
                command.append("with-thread")
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._inbox = bytearray()
        self._exit = _Exit(self._process)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

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
        self._process.kill()
        self._process.wait()
        self._exit.close()
        self._connection.close()
        self._socket.close()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            # It has closed its socket, and something keeps it from ending.
            self._process.kill()
            code = self._process.wait()
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
    """Something that can be waited for beside sockets, and is ready when a process has ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._writing: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel
                self.handle = os.pidfd_open(process.pid)
                return
        self.handle, self._writing = os.pipe()
        threading.Thread(target=self._wait, name="thrifty-exit", daemon=True).start()

    def is_set(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _wait(self) -> None:
        """Say by a byte that the process has ended: closing is not enough, forks may hold a copy."""
        assert self._writing is not None
        self._process.wait()
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(self._writing, b".")
        os.close(self._writing)


def parent_of(arguments: list[str]) -> Connection:
    """Return a child's connection to its parent, and have the child end when the parent does.

    Args:
        arguments: What ``Child`` has put behind the name of the module.
    """
    fd, parent, *rest = arguments
    # Ctrl-C reaches all processes of a terminal; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(int(parent), by_kernel="with-thread" in rest)
    return Connection(int(fd))


def _end_with(parent: int, *, by_kernel: bool) -> None:
    if by_kernel and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="thrifty-parent", daemon=True).start()


def _watch(parent: int) -> None:
    """End this process when its parent is gone; it has another one then."""
    gone = threading.Event()
    while os.getppid() == parent:
        gone.wait(LOOK_S)
    os._exit(1)
