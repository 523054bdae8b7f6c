"""Workers on this machine: in this process, or one process each."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thrifty.core import StoreWriteError, UsageError
from thrifty.core._child import Child, ChildEndedError, pickled, wait_for
from thrifty.core._determinism import STREAMS
from thrifty.pack import ACTIVATION_DISK, Prefer, Task, Trainable
from thrifty.store._plan_files import MAX_BASE_BYTES

from ._executor import (
    Assignment,
    Cut,
    Executor,
    ExecutorConfig,
    Refusal,
    Report,
    WorkerSlot,
    check_options,
)
from ._worker import Worker, WorkerSpec


class InlineExecutor(Executor):
    """An executor that trains inside ``poll``, one epoch at a time.

    Raises:
        UsageError: Another thread of this process trains.
    """

    def __init__(self, worker: Worker, *, stop_flag: list[bool]) -> None:
        STREAMS.take("a study")
        self._is_closed = False
        self._worker = worker
        self._stop_flag = stop_flag

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start."""
        return max(0, pack_size - self._worker.num_active)

    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker."""
        self._worker.submit(assignment)

    def refuse(self, key: str, reason: str) -> None:
        """Tell the worker not to fuse trials of a structure."""
        self._worker.refuse(key, reason)

    def cut(self, assignment: int) -> None:
        """End an assignment with its current epoch."""
        self._worker.cut(assignment)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Train until at least one epoch has ended, and return the reports."""
        return self._worker.advance()

    def stop(self) -> None:
        """Ask the worker to save its states at the end of the current epoch and finish."""
        self._stop_flag[0] = True

    def close(self) -> None:
        """Stop the worker."""
        try:
            self._worker.close()
        finally:
            if not self._is_closed:
                self._is_closed = True
                STREAMS.give_back()


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
        self._task = pickled(task)
        limit = math.inf if epoch_timeout_s is None else epoch_timeout_s
        self._workers = [_Process(spec, limit_s=limit, clock=clock) for spec in specs]

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start."""
        return sum(worker.slot.num_free(pack_size) for worker in self._workers)

    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker with the least work.

        Of several, that which has just trained what the assignment goes on from, or one that runs.
        """
        worker = min(
            self._workers,
            key=lambda w: (
                w.slot.num_free(1) <= 0,
                len(w.slot.assignments),
                not w.slot.has_state_of(assignment),
                not w.alive,
            ),
        )
        worker.give(assignment, task=self._task)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return the new reports of the workers.

        Raises:
            StoreWriteError: A worker cannot write checkpoints.
            UsageError: A worker cannot load the task.
        """
        busy = {w.child: w for w in self._workers if w.child and w.slot.assignments}
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

    def cut(self, assignment: int) -> None:
        """Tell the worker that has an assignment to end it with its current epoch."""
        for worker in self._workers:
            worker.cut(assignment)

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
        self.slot = WorkerSlot(spec.name)

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    def give(self, assignment: Assignment, *, task: bytes) -> None:
        if not self.alive:
            self._start(task)
        assert self.child is not None
        if not self.slot.assignments and self._heard_at < math.inf:
            self._heard_at = self._clock()  # it was idle, so its silence does not count
        self.slot.take(assignment)
        self.child.send(assignment)

    def receive(self) -> list[Report]:
        """Return the new reports; if the process has ended, report its worker as lost."""
        assert self.child is not None
        reports: list[Report] = []
        try:
            messages = self.child.receive()
        except ChildEndedError as error:
            self.end()
            return self.slot.vanish(str(error))
        for message in messages:
            self._heard_at = self._clock()
            if isinstance(message, WriteError):
                self.slot.clear()
                raise StoreWriteError(message.message)
            if isinstance(message, LoadError):
                self.slot.clear()
                raise UsageError(
                    "the task cannot be loaded by a worker process; see that the modules it "
                    "needs can be imported there. "
                    f"What the worker says:\n{message.traceback}"
                )
            self.slot.note(message)
            reports.extend(message)
        return reports

    def left_s(self) -> float:
        """Return the seconds until the process counts as hung, unless it sends a message."""
        return self._heard_at + self._limit_s - self._clock()

    def end_if_hung(self) -> list[Report]:
        if self.child is None or not self.slot.assignments or self.left_s() > 0:
            return []
        self.end()
        return self.slot.time_out(self._limit_s)

    def refuse(self, refusal: Refusal) -> None:
        refused = {**self._spec.refused, refusal.key: refusal.reason}
        self._spec = replace(self._spec, refused=refused)
        if self.child is not None:
            self.child.send(refusal)

    def cut(self, assignment: int) -> None:
        if assignment in self.slot.assignments and self.child is not None:
            self.child.send(Cut(assignment=assignment))

    def ask_to_stop(self) -> None:
        if self.slot.assignments and self.child is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(ExecutorConfig):
    """An executor configuration that trains on this machine.

    ``workers`` is the number of workers (default: one for each GPU, or one on the CPU). A single
    worker trains in this process; several run in processes of their own. ``devices`` names their
    devices, assigned in turn (default: all GPUs, or ``cpu``).

    ``threads`` is the number of CPU threads of each worker. Results on a CPU may depend on it in
    the last bits. So the first run of a search plan fixes it (default: an equal share of the
    cores), and all later runs keep it, however many workers they have; another number is then an
    error. Results never depend on the number of workers.

    ``pack`` says how a worker trains several trials jointly:

    - ``"auto"`` fuses models into one batched computation where that works and is faster (results
      are equal up to rounding).
    - ``"fused"`` fuses wherever that works.
    - ``"concatenated"`` keeps every trial bit-identical to the same trial trained alone.
    - ``"solo"`` trains one trial at a time.

    ``pack_size`` fixes the number of trials trained jointly (default: the size that, by
    measurement, ends the study first). ``memory_margin`` is the fraction of a device's memory that
    a pack may use.

    ``epoch_timeout`` is the number of seconds that a worker may take for one epoch (default: no
    limit). It covers everything until an epoch ends, so also making a model, reading data,
    evaluating and checking. A worker that takes longer is killed, and its trial fails. If it
    trained several trials, each of them is trained again, alone, to find out which one hangs. With
    a limit even a single worker is a process of its own, because a thread cannot be killed.

    ``activation_memory`` is the number of bytes in which a worker keeps activations of frozen
    layers, so that they are computed once for each sample (default: a quarter of the memory that
    is free; 0 keeps none). ``activation_disk`` is the number of bytes of files with activations
    beside the checkpoints, which later runs read (0 writes none).

    >>> Local(workers=2, threads=1, pack_size=8)
    Local(workers=2, devices=(), threads=1, pack='auto', pack_size=8, memory_margin=0.9,
        epoch_timeout=None, activation_memory=None, activation_disk=2147483648)

    Raises:
        UsageError: An option is invalid: fewer than one worker, thread or trial per pack, an
            unknown ``pack``, a ``memory_margin`` outside (0, 1], an ``epoch_timeout`` that is not
            a positive number, ``devices`` that are not a list of names, or a negative
            ``activation_memory`` or ``activation_disk``. When a run begins: a device is not there.
    """

    workers: int | None = None
    devices: tuple[str, ...] = field(default=())
    threads: int | None = None
    pack: Prefer = "auto"
    pack_size: int | None = None
    memory_margin: float = 0.9
    epoch_timeout: float | None = None
    activation_memory: int | None = None
    activation_disk: int = ACTIVATION_DISK

    def __post_init__(self) -> None:
        check_options(self)
        for option in ("activation_memory", "activation_disk"):
            value = getattr(self, option)
            if value is None and option == "activation_memory":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"Local({option}={value!r}): give a number of bytes, 0 or more")
        names = self.devices
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"Local(devices={names!r}): give a list of names, such as ('cuda:0', 'cuda:1')"
            )

    def open(
        self,
        task: Task | Trainable,
        *,
        checkpoints: str,
        folder: str,
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
        max_base_bytes: float = MAX_BASE_BYTES,
    ) -> Executor:
        """Return the executor for a task."""
        devices = self.local_devices
        for name in devices:
            _check_device(name)
        workers = self.num_workers
        threads = self.threads or self.default_threads
        specs = [
            WorkerSpec(
                name=f"{devices[i % len(devices)]}-{i}",
                device=devices[i % len(devices)],
                threads=threads,
                checkpoints=checkpoints,
                folder=folder,
                pack=self.pack,
                curves=curves or {},
                refused=refused or {},
                activation_memory=self.activation_memory,
                activation_disk=self.activation_disk,
                max_base_bytes=max_base_bytes,
                epoch_timeout=self.epoch_timeout,
            )
            for i in range(workers)
        ]
        if workers == 1 and self.epoch_timeout is None:
            stop_flag = [False]
            worker = Worker(task, specs[0], should_stop=lambda: stop_flag[0])
            return InlineExecutor(worker, stop_flag=stop_flag)
        return ProcessExecutor(task, specs, epoch_timeout_s=self.epoch_timeout)

    @property
    def default_threads(self) -> int:
        """CPU threads of each worker if ``threads`` is None: an equal share of the cores."""
        return max(1, num_cores() // self.num_workers)

    def with_threads(self, threads: int) -> Local:
        """Return a copy with ``threads`` CPU threads for each worker."""
        return replace(self, threads=threads)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.workers or len(self.local_devices)

    @property
    def local_devices(self) -> tuple[str, ...]:
        """Devices that workers train on: those given, or all GPUs, or the CPU."""
        return self.devices or _default_devices()


def _check_device(name: str) -> None:
    """Check that workers can train on a device.

    Raises:
        UsageError: PyTorch does not know it, or it is a GPU that is not there.
    """
    where = f"Local(devices=[{name!r}])"
    try:
        place = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"{where}: PyTorch knows no such device; give 'cpu', or a GPU such as 'cuda:0'"
        ) from None
    if place.type != "cuda":
        return
    if place.index is None:
        raise UsageError(f"{where}: say which GPU, such as 'cuda:0'; left out, all are used")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.index >= count:
        raise UsageError(
            f"{where}: this PyTorch sees {count or 'no'} GPU{'' if count == 1 else 's'}; "
            "leave devices out, or give ('cpu',) (`thrifty doctor` says what it sees)"
        )


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_devices() -> tuple[str, ...]:
    if torch.cuda.is_available():
        return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return ("cpu",)
