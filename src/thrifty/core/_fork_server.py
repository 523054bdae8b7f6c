"""The main program of the process that children are forked from: what they need is imported once, and not for each.

Importing torch and building a first optimizer (which imports its compiler) takes three seconds of a core;
a fork of a process that has done both is up in milliseconds and shares its memory. The idea is that of
``multiprocessing``'s fork server. Ours hands on more of the process that asks (its streams and folder;
who asks starts another server when its environment changes), tells each child's end on a pipe of its own,
and its children end with it, as it ends with the process that has started it.

It has one thread and runs no user code, so that nothing is held or half done when it forks. Where a fork
is not safe (an accelerator's driver; other systems than Linux), children are started from scratch.
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


LOOK_S = 1.0
"""How often it is looked whether a parent lives, where the kernel does not tell."""

MAX_REQUEST = 1 << 16
"""Bytes of a request."""

NUM_FILES = 5
"""Files of a request: where the child's end is told, its socket, and its three streams."""

_PR_SET_PDEATHSIG = 1
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel")
"""With one of them, what is imported may have woken a driver that does not survive a fork."""


def main(arguments: list[str]) -> None:
    """Serves requests until the process that has started it goes away."""
    fd, parent, *rest = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    if "with-thread" in rest:
        end_with_parent()
    with socket.socket(fileno=int(fd)) as requests:
        _Server(requests, int(parent)).serve()


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that has started it ends, where it can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Server:
    """Starts children, ends them, and tells their ends."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._told_on: dict[int, int] = {}
        """By process: the pipe on which its end is told."""
        self._started: list[int] = []
        """All processes, in the order of the requests."""
        # Its handler does nothing: that a child has ended only has to wake `select`.
        self._woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._open = True

    def serve(self) -> None:
        """Go on until nobody asks any more and all children have ended, or the parent is gone."""
        while (self._open or self._told_on) and os.getppid() == self._parent:
            waiting: list[Any] = [self._woken, *([self._requests] if self._open else [])]
            ready, _, _ = select.select(waiting, [], [], LOOK_S)
            if self._woken in ready:
                os.read(self._woken, MAX_REQUEST)
            self._tell_ends()
            if self._requests in ready:
                self._answer()

    def _answer(self) -> None:
        data, files, _, _ = socket.recv_fds(self._requests, MAX_REQUEST, NUM_FILES)
        if not data:
            self._open = False
            return
        request = json.loads(data)
        if "end" in request:
            pid = self._started[request["end"]]
            if pid in self._told_on:  # else another process may have its number by now
                os.kill(pid, signal.SIGKILL)
            return
        for name in request["preload"]:
            with contextlib.suppress(
                Exception
            ):  # the child that needs it will say what is wrong
                importlib.import_module(name)
        pid = self._fork(request, files) if may_fork() else _start(request, files)
        self._started.append(pid)
        self._told_on[pid] = files[0]
        for file in files[1:]:
            os.close(file)
        with contextlib.suppress(OSError):  # nobody waits for the answer
            self._requests.send(json.dumps(pid).encode())

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python counts the threads of linear algebra libraries, which do survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            for file in (*self._told_on.values(), files[0], self._woken):
                os.close(file)
            os.close(signal.set_wakeup_fd(-1))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            server = os.getppid()
            _run(request, files, server)
        finally:
            os._exit(1)  # never back into the server's loop

    def _tell_ends(self) -> None:
        for pid, file in list(self._told_on.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._told_on[pid]
                with contextlib.suppress(OSError):  # nobody waits any more
                    os.write(file, json.dumps(os.waitstatus_to_exitcode(status)).encode())
                os.close(file)


def may_fork() -> bool:
    """Whether this process can be forked once torch is imported."""
    return sys.platform == "linux" and not any(Path(name).exists() for name in _DEVICES)


def _start(request: dict[str, Any], files: list[int]) -> int:
    """Start a child from scratch; return its number."""
    command = [sys.executable, "-m", request["module"], str(files[1]), str(os.getpid())]
    process = subprocess.Popen(
        [*command, "with-thread"],
        pass_fds=[files[1]],
        stdin=files[2],
        stdout=files[3],
        stderr=files[4],
        cwd=request["folder"] or None,
    )
    process.returncode = 0  # it is waited for here, with the others
    return process.pid


def _run(request: dict[str, Any], files: list[int], server: int) -> NoReturn:
    """What a forked child does."""
    for stream, file in enumerate(files[2:]):
        os.dup2(file, stream)
        os.close(file)
    code = 1
    try:
        with contextlib.suppress(OSError):  # it has been removed
            os.chdir(request["folder"])
        if not sys.flags.safe_path:
            sys.path[0] = request["folder"]
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # as in a new process; Python's own is seeded by the fork
        importlib.invalidate_caches()  # of folders that have been listed before
        sys.argv = [request["module"], str(files[1]), str(server), "with-thread"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 (told as the interpreter would)
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
