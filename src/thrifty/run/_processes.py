"""Worker processes on this machine: one long-lived process for each worker.

Each process gets the task once. Cloudpickle sends code by value where it must, so scripts need no
``__main__`` guard and notebooks work.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cloudpickle

from thrifty.core import StoreWriteError, UsageError
from thrifty.core._child import Child, ChildEndedError, wait_for
from thrifty.pack import Task, Trainable

from ._assignment import Assignment, Refusal, Report
from ._executor import Executor
from ._seat import Seat
from ._worker import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteError:
    """A message that a worker could not write to the store."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadError:
    """A message that a worker could not load the task."""

    traceback: str


_PRELOAD = ("thrifty.run._worker", "torch._dynamo")
"""Slow modules to preload; torch imports ``torch._dynamo`` when it makes the first optimizer."""


class ProcessExecutor(Executor):
    """An executor that starts a worker's process when it first gets work, and again if it dies.

    Args:
        task: The task to train.
        specs: One specification for each worker.
        epoch_timeout_s: A worker is killed if no epoch ends within this time. None: no limit.
        clock: A function that returns monotonic seconds.
    """

    def __init__(
        self,
        task: Task | Trainable,
        specs: Sequence[WorkerSpec],
        *,
        epoch_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = cloudpickle.dumps(task)
        limit = math.inf if epoch_timeout_s is None else epoch_timeout_s
        self._workers = [_Process(spec, limit_s=limit, clock=clock) for spec in specs]

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start."""
        return sum(worker.seat.num_free(pack_size) for worker in self._workers)

    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker with the least work, preferably one that is running."""
        worker = min(
            self._workers,
            key=lambda w: (w.seat.num_free(1) <= 0, len(w.seat.assignments), not w.alive),
        )
        worker.give(assignment, task=self._task)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return the new reports of the workers.

        Raises:
            StoreWriteError: A worker cannot write checkpoints.
            UsageError: A worker cannot load the task.
        """
        busy = {w.child: w for w in self._workers if w.child and w.seat.assignments}
        if not busy:
            return []
        left_s = min(worker.left_s() for worker in busy.values())
        reports: list[Report] = []
        for ready in wait_for(busy, max(0.0, min(timeout_s, left_s))):
            reports.extend(busy[ready].receive())
        for worker in busy.values():
            reports.extend(worker.end_if_hung())
        return reports

    def refuse(self, key: str, reason: str) -> None:
        """Tell all workers, including those that start later, not to fuse a structure."""
        for worker in self._workers:
            worker.refuse(Refusal(key=key, reason=reason))

    def stop(self) -> None:
        """Ask all workers to save their current states and finish."""
        for worker in self._workers:
            worker.ask_to_stop()

    def close(self) -> None:
        """Kill all workers now."""
        for worker in self._workers:
            worker.end()


class _Process:
    """One worker process and its assignments."""

    def __init__(self, spec: WorkerSpec, *, limit_s: float, clock: Callable[[], float]) -> None:
        self._spec = spec
        self._limit_s = limit_s
        self._clock = clock
        self._heard_at = math.inf
        """When the process last sent a message or got work while idle; infinity while it starts."""
        self.child: Child | None = None
        self.seat = Seat(spec.name)

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    def give(self, assignment: Assignment, *, task: bytes) -> None:
        if not self.alive:
            self._start(task)
        assert self.child is not None
        if not self.seat.assignments and self._heard_at < math.inf:
            self._heard_at = self._clock()  # it was idle, so its silence does not count
        self.seat.take(assignment)
        self.child.send(assignment)

    def receive(self) -> list[Report]:
        """Return the new reports; if the process has ended, report its worker as lost."""
        assert self.child is not None
        reports: list[Report] = []
        try:
            messages = self.child.receive()
        except ChildEndedError as error:
            self.end()
            return self.seat.vanish(str(error))
        for message in messages:
            self._heard_at = self._clock()
            if isinstance(message, WriteError):
                self.seat.clear()
                raise StoreWriteError(message.message)
            if isinstance(message, LoadError):
                self.seat.clear()
                raise UsageError(
                    "the task cannot be loaded by a worker process; see that the modules it "
                    "needs can be imported there. "
                    f"What the worker says:\n{message.traceback}"
                )
            self.seat.note(message)
            reports.extend(message)
        return reports

    def left_s(self) -> float:
        """Return the seconds until the process counts as hung, unless it sends a message."""
        return self._heard_at + self._limit_s - self._clock()

    def end_if_hung(self) -> list[Report]:
        if self.child is None or not self.seat.assignments or self.left_s() > 0:
            return []
        self.end()
        return self.seat.time_out(self._limit_s)

    def refuse(self, refusal: Refusal) -> None:
        refused = {**self._spec.refused, refusal.key: refusal.reason}
        self._spec = replace(self._spec, refused=refused)
        if self.child is not None:
            self.child.send(refusal)

    def ask_to_stop(self) -> None:
        if self.seat.assignments and self.child is not None:
            self.child.send("stop")

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None

    def _start(self, task: bytes) -> None:
        self.end()
        self._heard_at = math.inf
        self.child = Child("thrifty.run._worker_main", preload=_PRELOAD)
        self.child.send(self._spec)
        self.child.send(sys.path)
        self.child.send_bytes(task)
