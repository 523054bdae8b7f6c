"""Worker processes on this machine: one long-lived process for each worker, a socket pair to each.

The task is sent once, by value where it must be (cloudpickle), so scripts need no ``__main__`` guard and
notebooks work. Messages are pickled: both ends are ours, and nothing else can reach the socket.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import cloudpickle

from thrifty.core import StoreWriteError
from thrifty.pack import Task, Trainable

from ._assignment import Assignment, Report
from ._executor import Executor
from ._seat import Seat
from ._worker import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteError:
    """The store could not be written by a worker."""

    message: str


class ProcessExecutor(Executor):
    """Starts a process for each worker when it first gets work, and again if it dies."""

    def __init__(self, task: Task | Trainable, specs: Sequence[WorkerSpec]) -> None:
        self._task = cloudpickle.dumps(task)
        self._workers = [_Process(spec) for spec in specs]

    def num_free(self, *, pack_size: int = 1) -> int:
        """How many more assignments can start."""
        return sum(worker.seat.num_free(pack_size) for worker in self._workers)

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker that has least to do, one that is already running if there is one."""
        worker = min(
            self._workers,
            key=lambda w: (w.seat.num_free(1) <= 0, len(w.seat.assignments), not w.alive),
        )
        worker.give(assignment, task=self._task)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What the workers have said since."""
        busy = {w.connection: w for w in self._workers if w.seat.assignments}
        if not busy:
            return []
        reports: list[Report] = []
        for ready in wait([c for c in busy if c is not None], timeout=timeout_s):
            assert isinstance(ready, Connection)
            reports.extend(busy[ready].receive())
        return reports

    def stop(self) -> None:
        """Asks all workers to keep their present states and be through."""
        for worker in self._workers:
            worker.ask_to_stop()

    def close(self) -> None:
        """Ends all workers now."""
        for worker in self._workers:
            worker.end()


class _Process:
    """One worker process, its connection, and what it is doing."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.seat = Seat(spec.name)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def give(self, assignment: Assignment, *, task: bytes) -> None:
        if not self.alive:
            self._start(task)
        assert self.connection is not None
        self.seat.take(assignment)
        # if it died between two assignments, receive() will find out and say so
        with contextlib.suppress(OSError):
            self.connection.send(assignment)

    def receive(self) -> list[Report]:
        """All messages that have come; a closed connection is a lost worker."""
        assert self.connection is not None
        reports: list[Report] = []
        try:
            while self.seat.assignments and self.connection.poll(0):
                message = self.connection.recv()
                if isinstance(message, WriteError):
                    self.seat.clear()
                    raise StoreWriteError(message.message)
                self.seat.note(message)
                reports.extend(message)
        except (EOFError, ConnectionError):
            reports.extend(self._lost())
        return reports

    def ask_to_stop(self) -> None:
        if self.seat.assignments and self.connection is not None:
            with contextlib.suppress(OSError):  # it is dead: receive() will find out
                self.connection.send("stop")

    def end(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, task: bytes) -> None:
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "thrifty.run._worker_main", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())
        self.connection.send(self._spec)
        self.connection.send(sys.path)
        self.connection.send_bytes(task)

    def _lost(self) -> list[Report]:
        assert self._process is not None
        code = self._process.wait()
        self.end()
        return self.seat.vanish(
            f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        )
