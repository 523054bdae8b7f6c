"""Fork server: imports heavy modules once and forks worker processes from itself.

Importing torch and building the first optimizer (which imports ``torch._dynamo``) costs three
seconds of CPU per process. A fork of a process that has already done both starts in milliseconds
and shares the imported modules' memory.

The idea is that of ``multiprocessing``'s fork server. This one also passes on the parent's current
working directory and standard streams, reports each child's exit status on its own pipe, and ends
its children when the parent dies.

The server has one thread and runs no user code, so no lock is held and no work is half done when
it forks. Where forking is unsafe (accelerator drivers, systems other than Linux), it starts
children as new interpreters instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from ._heap import gc_off_at_exit, gc_paused


PARENT_POLL_S = 1.0
"""Seconds between checks that the parent is alive, for systems whose kernel does not signal it."""

MAX_REQUEST_BYTES = 1 << 16

NUM_FILES = 5
"""File descriptors in a request: exit-status pipe, the child's socket, stdin, stdout, stderr."""

_PR_SET_PDEATHSIG = 1

_ACCELERATOR_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel")
"""If one of these exists, an import may have initialised a driver that does not survive a fork."""


def main(arguments: list[str]) -> None:
    """Serve requests until the parent exits.

    Args:
        arguments: File descriptor of the request socket, the parent's pid, and optionally
            ``"with-thread"`` if the kernel may kill the server with the thread that started it.
    """
    fd, parent, *rest = arguments
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "with-thread" in rest:
        die_with_parent()
    with socket.socket(fileno=int(fd)) as requests:
        _Server(requests, int(parent)).serve()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it exits (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without prctl
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def may_fork() -> bool:
    """Return whether this process can fork safely after it has imported torch."""
    return sys.platform == "linux" and not any(
        Path(device).exists() for device in _ACCELERATOR_DEVICES
    )


class _Server:
    """The fork server, which starts, kills and reaps child processes on request."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._is_open = True
        self._parent = parent
        self._pids: list[int] = []
        """Child pids, indexed by request number."""
        self._exit_pipes: dict[int, int] = {}
        """Write end of the exit-status pipe of each running child, by pid."""
        # The SIGCHLD handler does nothing: the signal only has to wake up `select`.
        self._wakeup, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the parent is dead, or has closed the socket and all children have exited."""
        while (self._is_open or self._exit_pipes) and os.getppid() == self._parent:
            sources: list[Any] = [self._wakeup, *([self._requests] if self._is_open else [])]
            ready, _, _ = select.select(sources, [], [], PARENT_POLL_S)
            if self._wakeup in ready:
                os.read(self._wakeup, MAX_REQUEST_BYTES)
            self._reap()
            if self._requests in ready:
                self._answer()

    def _answer(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, NUM_FILES)
        except ConnectionResetError:  # the parent has ended without reading all answers
            data, files = b"", []
        if not data:
            self._is_open = False
            return
        request = json.loads(data)
        if "kill" in request:
            pid = self._pids[request["kill"]]
            if pid in self._exit_pipes:  # otherwise the kernel may have reused its number
                os.kill(pid, signal.SIGKILL)
            return
        for name in request["preload"]:
            # the child that imports it shows the error
            with gc_paused(), contextlib.suppress(Exception):
                importlib.import_module(name)
        pid = self._fork(request, files) if may_fork() else _spawn(request, files)
        self._pids.append(pid)
        self._exit_pipes[pid] = files[0]
        for file in files[1:]:
            os.close(file)
        with contextlib.suppress(OSError):  # the parent no longer reads answers
            self._requests.send(json.dumps(pid).encode())

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns about the threads of OpenBLAS, which handles forks itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)  # Python 3.13 has done so at the fork
            for file in (*self._exit_pipes.values(), files[0], self._wakeup, self._waking):
                os.close(file)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            _run(request, files, server=os.getppid())
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)  # never return to the server's loop

    def _reap(self) -> None:
        """Collect children that have exited and report their exit status."""
        for pid, pipe in list(self._exit_pipes.items()):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                del self._exit_pipes[pid]
                with contextlib.suppress(OSError):  # the parent no longer waits for it
                    os.write(pipe, json.dumps(os.waitstatus_to_exitcode(status)).encode())
                os.close(pipe)


def _spawn(request: dict[str, Any], files: list[int]) -> int:
    """Start a child as a new interpreter and return its pid."""
    command = [sys.executable, "-m", request["module"], str(files[1]), str(os.getpid())]
    process = subprocess.Popen(
        [*command, "with-thread"],
        pass_fds=[files[1]],
        stdin=files[2],
        stdout=files[3],
        stderr=files[4],
        cwd=request["folder"] or None,
    )
    process.returncode = 0  # `_reap` waits for it, so Popen must not
    return process.pid


def _run(request: dict[str, Any], files: list[int], *, server: int) -> NoReturn:
    """Run the requested module as ``__main__`` in a forked child, then exit."""
    for stream, file in enumerate(files[2:]):
        os.dup2(file, stream)
        os.close(file)
    code = 1
    try:
        with contextlib.suppress(OSError):  # the folder has been removed
            os.chdir(request["folder"])
        if not sys.flags.safe_path:
            sys.path[0] = request["folder"]
        if (numpy := sys.modules.get("numpy")) is not None:
            # A new interpreter starts with fresh entropy. Python reseeds `random` after a fork,
            # NumPy does not.
            numpy.random.seed()
        importlib.invalidate_caches()  # modules may have been written since the last import
        sys.argv = [request["module"], str(files[1]), str(server), "with-thread"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 (print it as the interpreter would)
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc_off_at_exit()
    main(sys.argv[1:])
