"""Local workers: in this process, or one process for each device."""

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
    """Trains on this machine.

    ``workers`` defaults to one for each GPU, or one on the CPU. One worker trains in this process; several are
    processes of their own. ``devices`` names their devices (default: all GPUs, or ``cpu``), used in turn;
    ``threads`` is how many CPU threads each may use. Results on a CPU may depend on it in the last bits, so it is
    fixed by the first run of a search plan (default: an equal share of the cores) and kept by all later ones,
    however many workers they have; another number is an error then. Results never depend on the number of workers.

    ``pack`` says how a worker trains several trials jointly: ``"auto"`` fuses models into one batched computation where that works
    and pays (results equal up to rounding), ``"fused"`` wherever it works; ``"concatenated"`` keeps every trial bit-identical to one
    alone; ``"solo"`` trains one at a time. ``pack_size`` fixes how many (default: by measurement, what ends the study first);
    ``memory_margin`` is the share of a device's memory that a pack may take.

    ``epoch_timeout`` is how many seconds a worker may take for one epoch: for all that it does until an epoch ends, so
    also for making a model, reading data, evaluating and checking. A worker that takes longer is killed, and its trial
    fails. If it trained several trials, each of them is trained again, alone, to find out which one hangs. With a
    time limit even a single worker is a process of its own, because nothing can stop a thread (default: no limit).

    >>> Local(workers=2, threads=1, pack_size=8)
    Local(workers=2, devices=(), threads=1, pack='auto', pack_size=8, memory_margin=0.9, epoch_timeout=None)

    Raises:
        UsageError: no workers, no threads, an unknown way to pack, a margin that is no share, no time for an epoch.
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
        """The executor for a task."""
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
        """An equal share of the cores."""
        return max(1, num_cores() // self.num_workers)

    def with_threads(self, threads: int) -> Local:
        """The same with so many CPU threads for each worker."""
        return replace(self, threads=threads)

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        return self.workers or len(self.devices or _default_devices())


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_devices() -> tuple[str, ...]:
    if torch.cuda.is_available():
        return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return ("cpu",)
