"""Child processes that run one of thrifty's modules and exchange pickled messages with it.

A child and its parent talk over an anonymous socket pair that no other process can connect to, so
both may unpickle what the other sends. ``pickled`` makes the bytes of a user's code and objects,
also for processes that are no children.

Waiting for a child waits for its exit status as well as its socket: a process that the child forked
may keep the socket open long after the child has died. A child dies when its parent does, even in
the middle of a long computation.

Children are forked from a server process that has already imported what they need
(``_fork_server``).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ._fork_server import MAX_REQUEST_BYTES, PARENT_POLL_S, die_with_parent


EXIT_GRACE_S = 10.0
"""Seconds that a child may take to exit after it has closed its socket."""

_SERVER = ("-m", "thrifty.core._fork_server")

_IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST"}
"""Environment variables that change often and that no module reads while it is imported."""

_SHORT = 4
_LONG = 8


class ChildEndedError(Exception):
    """A child process has exited; the message says how."""


class Child:
    """A Python process that runs one of thrifty's modules.

    Args:
        module: Name of its main module, which must call ``parent_of``.
        preload: Modules that are slow to import, imported once for all children. They must not
            contain user code.
    """

    def __init__(self, module: str, *, preload: Sequence[str] = ()) -> None:
        self._server = _current_server()
        # Copy the streams before making sockets: if a stream is closed, a new socket would get its
        # number.
        streams = [_copy_of_stream(number) for number in range(3)]
        ours, theirs = socket.socketpair()
        try:
            self._request, self._exit = self._server.start(
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
        """Return the process id; wait until the process has been started.

        Raises:
            ChildEndedError: The fork server died before it started the process.
        """
        return self._server.pid(self._request)

    @property
    def alive(self) -> bool:
        """Return whether the process is running or about to start."""
        return not self._exit.is_set()

    def send(self, message: Any) -> None:
        """Send a message. If the child is dead, ``receive`` reports it."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def send_bytes(self, message: bytes) -> None:
        """Send bytes; the child reads them with ``recv_bytes``."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def receive(self) -> list[Any]:
        """Return all messages that have arrived, without waiting.

        Raises:
            ChildEndedError: There are no messages left and the process has exited.
        """
        ended = self._exit.is_set()  # read first, so that no message sent before it is missed
        closed = self._fill()
        messages = list(self._unpacked())
        if not messages and (ended or closed):
            raise ChildEndedError(self._how_it_ended())
        return messages

    def end(self) -> None:
        """Kill the process and release its sockets."""
        self._server.kill(self._request)
        self._exit.wait(None)
        self._exit.close()
        self._connection.close()
        self._socket.close()

    def _how_it_ended(self) -> str:
        if not self._exit.wait(EXIT_GRACE_S):
            # The child has closed its socket, but something keeps it from exiting.
            self._server.kill(self._request)
            self._exit.wait(None)
        code = self._exit.code
        if code is None:
            self._server.wait()
            return "together with its fork server"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _fill(self) -> bool:
        """Read what has arrived; return whether the child has closed its end."""
        try:
            while data := self._socket.recv(1 << 20, socket.MSG_DONTWAIT):
                self._inbox += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _unpacked(self) -> Iterator[Any]:
        """Yield the complete messages received, in the framing of ``Connection.send``."""
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
    """Wait until a child has sent a message or exited; return the children that have."""
    by_handle: dict[Any, Child] = {}
    for child in children:
        by_handle[child._socket] = by_handle[child._exit.handle] = child
    found = [by_handle[handle] for handle in wait(list(by_handle), timeout=timeout_s)]
    return list(dict.fromkeys(found))


class _ExitStatus:
    """Exit status of a process, read from a pipe that only the fork server writes to.

    No process that the child forks holds the pipe, so it cannot be kept open after the child's
    death.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.code: int | None = None
        """Exit code as in ``subprocess``; None while running, or if the fork server died too."""
        self._ended = False

    def is_set(self) -> bool:
        return self.wait(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether the process exits within ``timeout_s`` seconds (None waits for ever)."""
        if not self._ended and wait([self.handle], timeout=timeout_s):
            self._ended = True
            self.code = json.loads(os.read(self.handle, 100) or "null")
        return self._ended

    def close(self) -> None:
        """Close the pipe of a process that has exited."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class _Server:
    """A fork server and the requests sent to it; safe to use from several threads."""

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self._lock = threading.Lock()
        self._pids: list[int] = []
        self._num_requests = 0
        # SEQPACKET keeps the boundaries of messages: one packet is one request.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        with theirs:
            command = [sys.executable, *_SERVER, str(theirs.fileno()), str(os.getpid())]
            # The kernel kills a child when the *thread* that started it exits, so only the main
            # thread may ask for that.
            if threading.current_thread() is threading.main_thread():
                command.append("with-thread")
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        # This also runs when the interpreter exits.
        weakref.finalize(self, _stop_server, self._process, self._requests, os.getpid())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, module: str, *, preload: Sequence[str], files: Sequence[int]
    ) -> tuple[int, _ExitStatus]:
        """Request a child; return the number of the request and the child's exit status.

        Args:
            module: The child's main module.
            preload: Modules that the server imports first.
            files: The child's socket, stdin, stdout and stderr.
        """
        reading, writing = os.pipe()
        folder = ""
        with contextlib.suppress(FileNotFoundError):  # the folder has been removed
            folder = str(Path.cwd())
        request = {"module": module, "preload": list(preload), "folder": folder}
        try:
            with self._lock:
                with contextlib.suppress(OSError):  # a dead server shows in the exit status
                    data = [json.dumps(request).encode()]
                    socket.send_fds(self._requests, data, [writing, *files])
                self._num_requests += 1
                return self._num_requests - 1, _ExitStatus(reading)
        finally:
            os.close(writing)

    def pid(self, request: int) -> int:
        """Return a child's process id; wait until the child has been started.

        Raises:
            ChildEndedError: The server died before it started the child.
        """
        with self._lock:
            while len(self._pids) <= request:
                answer = b""
                with contextlib.suppress(ConnectionError):
                    answer = self._requests.recv(MAX_REQUEST_BYTES)
                if not answer:
                    raise ChildEndedError("its fork server died before it was started")
                self._pids.append(json.loads(answer))
        return self._pids[request]

    def kill(self, request: int) -> None:
        """Ask the server to kill a child."""
        with contextlib.suppress(OSError), self._lock:
            self._requests.send(json.dumps({"kill": request}).encode())

    def wait(self) -> None:
        """Wait for the exit of a dying server, so that the next child gets a new one."""
        self._process.wait()


_servers: list[_Server] = []
"""The server that forks new children. Python keeps an older one while a child refers to it."""

_servers_lock = threading.Lock()


def _current_server() -> _Server:
    """Return a fork server whose surroundings are this process's; start one if needed."""
    with _servers_lock:
        if not _servers or not _servers[0].alive or _servers[0].surroundings != _surroundings():
            _servers[:] = [_Server()]
        return _servers[0]


def _surroundings() -> dict[str, Any]:
    """Return what a child inherits and the server cannot pass on after it has started."""
    environment = {k: v for k, v in os.environ.items() if k not in _IGNORED_VARIABLES}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"pid": os.getpid(), "environment": environment, "cores": cores}


def _stop_server(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    """Kill a server and its children, unless this process is only a fork of its owner."""
    requests.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _copy_of_stream(number: int) -> int:
    """Return a duplicate of a standard stream, or of ``/dev/null`` if the stream is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


def parent_of(arguments: list[str]) -> Connection:
    """Return a child's connection to its parent, and make the child die with the parent.

    Args:
        arguments: The child's command-line arguments, as ``Child`` passes them.
    """
    fd, parent, *rest = arguments
    follow_parent(int(parent), with_thread="with-thread" in rest)
    return Connection(int(fd))


def fork_ignoring_interrupts() -> int:
    """Fork this process; return 0 in the child, which ignores Ctrl-C, and its pid in the parent.

    Ctrl-C is held back until the child ignores it. A child that it reaches earlier would raise
    KeyboardInterrupt somewhere in its copy of the parent's program.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:  # the parent has been interrupted meanwhile
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return pid


def follow_parent(parent: int, *, with_thread: bool) -> None:
    """Make this process, a child, ignore Ctrl-C and die with its parent.

    Args:
        parent: The parent's process id.
        with_thread: Whether the kernel may kill this process at the exit of the *thread* that
            started it, because that is the parent's main thread.
    """
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if with_thread:
        die_with_parent()
    threading.Thread(target=_watch, args=(parent,), name="thrifty-parent", daemon=True).start()


def _watch(parent: int) -> None:
    """Exit when the parent process has died, which changes the parent pid."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(PARENT_POLL_S)
    os._exit(1)


_CACHED = type(lru_cache(len))


def pickled(value: Any) -> bytes:
    """Return the bytes of an object; code that another process cannot import is among them.

    Unlike ``cloudpickle.dumps``, it takes functions under ``functools.lru_cache`` that a script
    itself defines, and properties under ``functools.cached_property``. The cache of such a function
    is empty in the other process.

    Args:
        value: An object, such as a task.

    Example::

        pickle.loads(pickled(lru_cache(lambda n: n + 1)))(1)  # 2
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _CACHED and not _can_be_imported(obj):
            # attributes travel as state, which may refer to the function itself
            own = {name: value for name, value in vars(obj).items() if name != "__wrapped__"}
            args = (obj.__wrapped__, obj.cache_parameters())
            return _cached, args, own or None, None, None, _set_attributes
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _is_imported(obj):
            # such as torch.backends.cudnn, whose settings are properties of a class of its own
            return import_module, (obj.__name__,)
        if type(obj) is cached_property:  # Python 3.11 gives it a lock, which cannot be pickled
            return _property, (obj.func, obj.attrname, obj.__doc__)
        return super().reducer_override(obj)


def _is_imported(module: ModuleType) -> bool:
    """Return whether another process finds a module under its name."""
    name = module.__name__
    return name != "__main__" and sys.modules.get(name) is module


def _can_be_imported(function: Any) -> bool:
    name = function.__module__
    if name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
        return False
    found: Any = sys.modules.get(name)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = lru_cache(**parameters)(function)
    return made


def _set_attributes(function: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
    vars(function).update(attributes)


def _property(
    function: Callable[[Any], Any], name: str | None, doc: str | None
) -> cached_property[Any]:
    made = cached_property(function)
    made.attrname, made.__doc__ = name, doc
    return made
