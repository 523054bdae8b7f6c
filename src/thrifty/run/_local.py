"""Local workers: in this process, or one process for each device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from thrifty.core import UsageError
from thrifty.pack import Task, Trainable
from thrifty.store import CheckpointFolder

from ._executor import Executor, ExecutorConfig
from ._inline import InlineExecutor
from ._processes import ProcessExecutor, WorkerSpec
from ._worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(ExecutorConfig):
    """Trains on this machine.

    ``workers`` defaults to one for each GPU, or one on the CPU. One worker trains in this process; several are
    processes of their own. ``devices`` names their devices (default: all GPUs, or ``cpu``), used in turn;
    ``threads`` is how many CPU threads each may use (default: an equal share of the cores). Results on a CPU may depend
    on the number of threads in the last bits, never on the number of workers.

    >>> Local(workers=2, threads=1)
    Local(workers=2, devices=(), threads=1)

    Raises:
        UsageError: no workers, no threads.
    """

    workers: int | None = None
    devices: tuple[str, ...] = field(default=())
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"Local({name}={value}): needs at least one")

    def open(self, task: Task | Trainable, *, checkpoints: str, folder: str) -> Executor:
        """The executor for a task."""
        devices = self.devices or _default_devices()
        workers = self.workers or len(devices)
        threads = self.threads or max(1, (os.cpu_count() or 1) // workers)
        if workers == 1:
            stop_flag = [False]
            worker = Worker(
                task,
                name=f"{devices[0]}-0",
                checkpoints=CheckpointFolder(checkpoints),
                folder=folder,
                device=devices[0],
                threads=threads,
                should_stop=lambda: stop_flag[0],
            )
            return InlineExecutor(worker, stop_flag=stop_flag)
        specs = [
            WorkerSpec(
                name=f"{devices[i % len(devices)]}-{i}",
                device=devices[i % len(devices)],
                threads=threads,
                checkpoints=checkpoints,
                folder=folder,
            )
            for i in range(workers)
        ]
        return ProcessExecutor(task, specs)


def _default_devices() -> tuple[str, ...]:
    if torch.cuda.is_available():
        return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return ("cpu",)
