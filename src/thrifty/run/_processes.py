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

from thrifty.core import Event, StageDone, StageFailed, StageStarted, StoreWriteError
from thrifty.pack import Task, Trainable

from ._assignment import Assignment, Report
from ._executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker process is told about itself."""

    name: str
    device: str
    threads: int
    checkpoints: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Through:
    """A worker's last word on an assignment; ``write_error`` if the store could not be written."""

    write_error: str | None = None


class ProcessExecutor(Executor):
    """Starts a process for each worker when it first gets work, and again if it dies."""

    def __init__(self, task: Task | Trainable, specs: Sequence[WorkerSpec]) -> None:
        self._task = cloudpickle.dumps(task)
        self._workers = [_Process(spec) for spec in specs]

    def num_free(self) -> int:
        """How many workers are idle."""
        return sum(worker.assignment is None for worker in self._workers)

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to an idle worker, one that is already running if there is one."""
        idle = [worker for worker in self._workers if worker.assignment is None]
        worker = max(idle, key=lambda each: each.alive)
        worker.give(assignment, task=self._task)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What the workers have said since."""
        busy = {w.connection: w for w in self._workers if w.assignment is not None}
        if not busy:
            return []
        reports: list[Report] = []
        for ready in wait([c for c in busy if c is not None], timeout=timeout_s):
            assert isinstance(ready, Connection)
            reports.extend(busy[ready].receive())
        return reports

    def stop(self) -> None:
        """Asks all workers to keep their present state and be through."""
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
        self.assignment: Assignment | None = None
        self._last: Event | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def give(self, assignment: Assignment, *, task: bytes) -> None:
        if not self.alive:
            self._start(task)
        assert self.connection is not None
        self.assignment, self._last = assignment, None
        # if it died between two assignments, receive() will find out and say so
        with contextlib.suppress(OSError):
            self.connection.send(assignment)

    def receive(self) -> list[Report]:
        """All messages that have come; a closed connection is a lost worker."""
        assert self.connection is not None
        assert self.assignment is not None
        number = self.assignment.number
        reports: list[Report] = []
        try:
            while self.assignment is not None and self.connection.poll(0):
                message = self.connection.recv()
                if isinstance(message, Through):
                    self.assignment = None
                    if message.write_error is not None:
                        raise StoreWriteError(message.write_error)
                    reports.append(Report(assignment=number))
                else:
                    self._last = message
                    reports.append(Report(assignment=number, event=message))
        except (EOFError, ConnectionError):
            reports.append(Report(assignment=number, event=self._lost()))
            reports.append(Report(assignment=number))
            self.assignment = None
            self.end()
        return reports

    def ask_to_stop(self) -> None:
        if self.assignment is not None and self.connection is not None and self.alive:
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

    def _lost(self) -> StageFailed:
        """Says which stage the worker was at when it vanished."""
        assert self.assignment is not None
        assert self._process is not None
        stages = self.assignment.chain.stages
        last, at = self._last, stages[0]
        if isinstance(last, StageStarted):
            at = next(s for s in stages if (s.node, s.stop) == (last.node, last.stop))
        elif isinstance(last, StageDone):
            rest = [s for s in stages if s.start >= last.stop]
            at = rest[0] if rest else stages[-1]
        elif last is not None:
            at = next(s for s in stages if s.node == last.node and s.stop >= last.epoch)  # type: ignore[union-attr]
        code = self._process.wait()
        why = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return StageFailed(
            node=at.node,
            start=at.start,
            stop=at.stop,
            epoch=at.start,
            kind="lost",
            message=f"WorkerLostError: worker {self._spec.name} ended unexpectedly ({why})",
            worker=self._spec.name,
        )
