"""Workers on this machine: one in this process, or several in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thrifty.core import UsageError
from thrifty.pack import Prefer, Task, Trainable

from ._executor import Executor, ExecutorConfig, check_options
from ._inline import InlineExecutor
from ._processes import ProcessExecutor
from ._worker import Worker, WorkerSpec


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

    >>> Local(workers=2, threads=1, pack_size=8)
    Local(workers=2, devices=(), threads=1, pack='auto', pack_size=8, memory_margin=0.9,
        epoch_timeout=None)

    Raises:
        UsageError: An option is invalid: fewer than one worker, thread or trial per pack, an
            unknown ``pack``, a ``memory_margin`` outside (0, 1], an ``epoch_timeout`` that is not
            a positive number, or ``devices`` that are not a list of names.
    """

    workers: int | None = None
    devices: tuple[str, ...] = field(default=())
    threads: int | None = None
    pack: Prefer = "auto"
    pack_size: int | None = None
    memory_margin: float = 0.9
    epoch_timeout: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
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
    ) -> Executor:
        """Return the executor for a task."""
        devices = self.devices or _default_devices()
        workers = self.workers or len(devices)
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
        return self.workers or len(self.devices or _default_devices())


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_devices() -> tuple[str, ...]:
    if torch.cuda.is_available():
        return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return ("cpu",)
