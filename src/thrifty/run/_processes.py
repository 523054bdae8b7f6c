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

from thrifty.core import (
    EpochDone,
    Event,
    StageDone,
    StageFailed,
    StageStarted,
    StoreWriteError,
)
from thrifty.pack import Task, Trainable
from thrifty.plan import Stage

from ._assignment import Assignment, Report
from ._executor import Executor
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
        return sum(worker.num_free(pack_size) for worker in self._workers)

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker that has least to do, one that is already running if there is one."""
        worker = min(
            self._workers, key=lambda w: (w.num_free(1) <= 0, len(w.assignments), not w.alive)
        )
        worker.give(assignment, task=self._task)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What the workers have said since."""
        busy = {w.connection: w for w in self._workers if w.assignments}
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
        self.assignments: dict[int, Assignment] = {}
        self._last: dict[int, Event] = {}
        self._suspects = 0
        """After a death with several trials on board, so many are trained alone, to find out whose fault it was."""

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def num_free(self, pack_size: int) -> int:
        return max(0, (1 if self._suspects else pack_size) - len(self.assignments))

    def give(self, assignment: Assignment, *, task: bytes) -> None:
        if not self.alive:
            self._start(task)
        assert self.connection is not None
        self.assignments[assignment.number] = assignment
        # if it died between two assignments, receive() will find out and say so
        with contextlib.suppress(OSError):
            self.connection.send(assignment)

    def receive(self) -> list[Report]:
        """All messages that have come; a closed connection is a lost worker."""
        assert self.connection is not None
        reports: list[Report] = []
        try:
            while self.assignments and self.connection.poll(0):
                message = self.connection.recv()
                if isinstance(message, WriteError):
                    self.assignments.clear()
                    raise StoreWriteError(message.message)
                for report in message:
                    self._note(report)
                    reports.append(report)
        except (EOFError, ConnectionError):
            reports.extend(self._lost())
        return reports

    def ask_to_stop(self) -> None:
        if self.assignments and self.connection is not None and self.alive:
            self.connection.send("stop")

    def end(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _note(self, report: Report) -> None:
        if report.event is None:
            del self.assignments[report.assignment]
            self._last.pop(report.assignment, None)
            self._suspects = max(0, self._suspects - 1)
        elif isinstance(report.event, StageStarted | EpochDone | StageDone):
            self._last[report.assignment] = report.event

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
        """Says which stages the worker was at when it vanished."""
        assert self._process is not None
        code = self._process.wait()
        why = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        alone = len(self.assignments) == 1
        reports: list[Report] = []
        for number, assignment in self.assignments.items():
            at = _stage_after(assignment, self._last.get(number))
            event = StageFailed(
                node=at.node,
                start=at.start,
                stop=at.stop,
                epoch=at.start,
                kind="lost" if alone else "crowded",
                message=f"WorkerLostError: worker {self._spec.name} ended unexpectedly ({why})",
                worker=self._spec.name,
            )
            reports += [
                Report(assignment=number, event=event),
                Report(assignment=number),
            ]
        self._suspects = max(self._suspects - 1, 0) if alone else len(self.assignments)
        self.assignments.clear()
        self._last.clear()
        self.end()
        return reports


def _stage_after(assignment: Assignment, last: Event | None) -> Stage:
    """The stage that an assignment was at after what was last heard of it."""
    stages = assignment.chain.stages
    if isinstance(last, StageStarted):
        return next(s for s in stages if (s.node, s.stop) == (last.node, last.stop))
    if isinstance(last, StageDone):
        rest = [s for s in stages if s.start >= last.stop]
        return rest[0] if rest else stages[-1]
    if isinstance(last, EpochDone):
        return next(s for s in stages if s.node == last.node and s.stop >= last.epoch)
    return stages[0]
