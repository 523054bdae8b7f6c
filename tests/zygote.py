"""A process that has imported torch and forks the Python programs that tests start.

A new interpreter spends two seconds of CPU on importing torch, a fork of one that has imported it
some milliseconds. Within ``forked_starts``, ``subprocess`` forks each ``python -c``, ``-m`` or
script from such a process, the *zygote*. Only libraries are imported before: a program imports
thrifty and everything else by itself.

A program is a real child of the process that starts it, with a process id, signals, a session and
an exit status of its own, and ends as an interpreter does. This works because the zygote forks
twice: the first fork exits at once, and the kernel gives the second to the *subreaper*, which is
the process that asked. Programs have zygotes of their own, so that what they start is forked, too.

Tests of the start itself (what a command imports, memory, flags of the interpreter) start real
interpreters, and so does everything while coverage is measured.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


_LIBRARIES = (
    "torch", "torch._dynamo", "sqlalchemy", "alembic.migration", "alembic.operations", "click",
    "rich.console", "rich.live", "rich.progress", "rich.table", "cloudpickle", "fsspec",
    "safetensors.torch",
)  # fmt: skip
"""What thrifty imports; torch imports ``torch._dynamo`` for the first optimizer."""

_FIXED = re.compile(
    r"PYTHON(?!PATH$)|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|TORCH|PYTORCH(?!_NVML)|LD_|MALLOC_|LANG|LC_|TZ$"
)
"""Environment variables that are read when an interpreter or a library starts.

Lightning sets one about NVIDIA's drivers, of which there are none where programs are forked.
"""

_SERVER = ["-m", "thrifty.core._fork_server"]

_MAX_FILES = 64
_FIRST_FREE = 512
"""Files are moved above this number while they get the numbers that the program expects."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


class ZygoteError(RuntimeError):
    """The zygote could not fork a program; the message says why."""


# -- the side that starts programs ---------------------------------------------------------------

RealPopen = subprocess.Popen


class Zygote:
    """The zygote of this process.

    Args:
        requests: Socket that it reads requests from.
        pid: Its process id.
    """

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._requests, self._pid = requests, pid
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._fixed = _fixed(os.environ)
        atexit.register(self.close)

    @classmethod
    def started(cls) -> Zygote:
        """Start a zygote as a new interpreter."""
        # Its own path is that of an interpreter without PYTHONPATH, to which programs add theirs.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = RealPopen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        process.returncode = 0  # `close` waits for it
        return cls(ours, process.pid)

    def has_settings_of(self, asked: Mapping[str, Any]) -> bool:
        """Return whether libraries would read the same settings in a new interpreter."""
        return _fixed(os.environ if asked["env"] is None else asked["env"]) == self._fixed

    def fork(self, asked: Mapping[str, Any]) -> int:
        """Start a program and return its process id.

        Raises:
            OSError: Its folder does not exist.
            ZygoteError: The zygote or the program died before the program began.
        """
        streams = [
            number if asked[name] == -1 else asked[name]
            for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        kept = sorted(map(int, asked["pass_fds"]))
        request = {
            "arguments": [os.fspath(each) for each in asked["args"]][1:],
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "files": [0, 1, 2, *kept],
            "session": asked["start_new_session"],
            "group": os.getpgrp() if asked["process_group"] == -1 else asked["process_group"],
            "client": os.getpid(),
            "ignored": [n for n in _SIGNALS if signal.getsignal(n) == signal.SIG_IGN],
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
        }
        with contextlib.ExitStack() as held, self._lock:
            text = held.enter_context(os.fdopen(os.memfd_create("request"), "w+"))
            json.dump(request, text)
            text.flush()
            folder = os.open(asked["cwd"] or ".", os.O_PATH | os.O_DIRECTORY)
            held.callback(os.close, folder)
            reading, writing = os.pipe()
            answer = held.enter_context(os.fdopen(reading))
            with _subreaper():
                try:
                    files = [text.fileno(), writing, folder, *streams, *kept]
                    socket.send_fds(self._requests, [b"fork"], files)
                except OSError as error:
                    raise ZygoteError(f"the zygote (process {self._pid}) is dead") from error
                finally:
                    os.close(writing)
                # Ends, too, if all processes that could answer have died.
                found = answer.read()
        if not found.isdecimal():
            raise ZygoteError(found or "the zygote or the program died before the program began")
        return int(found)

    def is_alive(self) -> bool:
        """Return whether the zygote runs."""
        return os.getpid() == self._owner and not os.waitid(
            os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        )

    def close(self) -> None:
        """End the zygote; programs that it has forked go on."""
        if os.getpid() == self._owner and self._requests.fileno() >= 0:
            self._requests.close()
            # It would not see the end of the socket while a fork of this process has it.
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


class Popen(subprocess.Popen):
    """``subprocess.Popen`` that forks Python programs from the zygote."""

    def _execute_child(self, *given: Any) -> None:
        asked = _PARAMETERS.bind(self, *given).arguments
        if not _is_usual(asked) or not self._is_forked(asked["args"][1:]):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        if not _zygotes or not _zygotes[0].is_alive():
            _zygotes[:] = [Zygote.started()]
        if not _zygotes[0].has_settings_of(asked):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid = _zygotes[0].fork(asked)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]

    def _is_forked(self, arguments: Sequence[str]) -> bool:
        return True


class ServerPopen(Popen):
    """``subprocess.Popen`` that forks only thrifty's fork servers from the zygote."""

    def _is_forked(self, arguments: Sequence[str]) -> bool:
        return list(arguments[:2]) == _SERVER


_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_zygotes: list[Zygote] = []
"""The zygote of this process, if it has one."""


@contextlib.contextmanager
def forked_starts(*, by: type[subprocess.Popen[Any]] = Popen) -> Iterator[None]:
    """Fork the Python programs that this process starts within the context.

    Args:
        by: ``ServerPopen`` to fork thrifty's own fork servers only, ``RealPopen`` to fork nothing.
    """
    from thrifty.core._fork_server import may_fork  # noqa: PLC0415 (programs import it themselves)

    before = subprocess.Popen
    if may_fork() and "COVERAGE_PROCESS_CONFIG" not in os.environ:
        subprocess.Popen = by  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def _is_usual(asked: Mapping[str, Any]) -> bool:
    """Return whether a program is Python's, without options that a fork cannot follow."""
    if isinstance(asked["args"], str | bytes | os.PathLike):
        return False
    program, *rest = map(os.fspath, asked["args"])
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    usual = {
        "executable": None, "preexec_fn": None, "close_fds": True, "shell": False, "gid": None,
        "gids": None, "uid": None, "umask": -1, "restore_signals": True,
    }  # fmt: skip
    return (
        program == sys.executable
        and bool(rest)
        and (rest[0] in {"-c", "-m"} or not rest[0].startswith("-"))
        and all(asked[name] == value for name, value in usual.items())
    )


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if _FIXED.match(key)}


def _umask() -> int:
    old = os.umask(0o22)
    os.umask(old)
    return old


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process become the parent of orphans among its descendants.

    Only for the moment of a fork: later orphans are for the system, which reaps them.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise ZygoteError(f"prctl({option}) failed")


# -- the zygote ----------------------------------------------------------------------------------

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _main(fd: int) -> None:
    """Serve requests; in a fork, run the program that was asked for, and return at its end."""
    path = sys.path[1:]  # without the folder of this file
    sys.path[:] = path
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):  # the program that needs it imports it
            importlib.import_module(name)
    # A program would otherwise look for garbage in all of it as it ends, which takes 0.7 s.
    gc.collect()
    gc.freeze()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 (not a path)
        raise ZygoteError(f"cannot fork safely: the imported libraries have {threads - 1} threads")
    requests = socket.socket(fileno=fd)
    while True:
        request = _serve(requests)
        if request["arguments"][:2] == _SERVER:
            break  # it forks by itself
        program = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if zygote := os.fork():
            theirs.close()
            _zygotes[:] = [Zygote(ours, zygote)]
            subprocess.Popen = Popen  # type: ignore[misc]
            break
        ours.detach()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even if a fork of the program has the socket
        if os.getppid() != program:
            os._exit(1)
        requests = _alone_with(theirs)
    _run(request["arguments"], path)


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork until there are no more requests; return the request in the fork."""
    for number in _SIGNALS:  # Ctrl-C and the like are for programs
        signal.signal(number, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(requests, 16, _MAX_FILES)
        if not data:
            os._exit(0)
        first = os.fork()
        if not first:
            first = os.getpid()
            if os.fork():
                os._exit(0)
            requests.detach()
            return _begin(files, first)
        os.waitpid(first, 0)
        for file in files:
            os.close(file)


def _begin(files: Sequence[int], first: int) -> dict[str, Any]:
    """Become what a new interpreter of the client would be, and tell the client."""
    with os.fdopen(files[0]) as text:
        text.seek(0)
        request: dict[str, Any] = json.load(text)
    answer = fcntl.fcntl(files[1], fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    try:
        while (parent := os.getppid()) != request["client"]:
            if parent != first:
                os._exit(1)  # the client has died
            time.sleep(0.0002)
        _take_over(request, files)
    except BaseException as error:  # noqa: BLE001 (the client raises it)
        os.write(answer, f"the program could not begin: {error!r}".encode())
        os._exit(1)
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    return request


def _take_over(request: Mapping[str, Any], files: Sequence[int]) -> None:
    if request["session"]:
        os.setsid()
    elif request["group"] != os.getpgrp():
        os.setpgid(0, request["group"])
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.fchdir(files[2])
    # A file may have the number that another one gets.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for each in files[3:]]
    targets = request["files"]
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target, inheritable=True)
    for low, high in zip(targets, [*targets[1:], _FIRST_FREE], strict=True):
        os.closerange(low + 1, high)
    for each in moved:
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])


def _alone_with(requests: socket.socket) -> socket.socket:
    """Close all files but a socket: who reads what the program writes waits for their end."""
    fd = fcntl.fcntl(requests.detach(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.closerange(3, fd)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    # A low number, so that programs close it with all others: a request to a zygote that died would
    # wait for ever if another process had its socket.
    os.dup2(fd, null, inheritable=False)
    os.close(fd)
    return socket.socket(fileno=null)


def _run(arguments: Sequence[str], path: Sequence[str]) -> None:
    """Run a program as the main program of this process."""
    sys.orig_argv = [sys.executable, *arguments]
    unbuffered = arguments[0] == "-u"
    how, *rest = arguments[1:] if unbuffered else arguments
    _open_streams(unbuffered=unbuffered or getattr(sys.stdout, "write_through", False))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python does so with its own
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        vars(processes)["ORIGINAL_DIR"] = str(Path.cwd())
    added = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(each) for each in added.split(os.pathsep) if each]  # noqa: PTH100
    sys.path[:] = dict.fromkeys([*paths, *path])
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if how == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = [how, *rest]
        sys.path.insert(0, str(Path(how).resolve().parent))
        name = os.path.abspath(how)  # noqa: PTH100 (as Python does, which keeps links)
        loader = importlib.machinery.SourceFileLoader("__main__", name)
        main.__dict__.update(__file__=name, __cached__=None, __loader__=loader)
        with io.open_code(name) as file:
            code = compile(file.read(), name, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _open_streams(*, unbuffered: bool) -> None:
    """Make ``sys.stdin`` and its like anew: the zygote's describe other files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        size = 0 if unbuffered and number else -1
        raw = open(number, "wb" if number else "rb", size, closefd=False)  # noqa: SIM115
        by_line = not unbuffered and (number == 2 or raw.isatty())
        stream = io.TextIOWrapper(
            raw, old.encoding, old.errors, newline="\n" if number else None,
            line_buffering=by_line, write_through=unbuffered,
        )  # fmt: skip
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        old.detach()  # what it holds is empty


if __name__ == "__main__":
    _main(int(sys.argv[1]))
