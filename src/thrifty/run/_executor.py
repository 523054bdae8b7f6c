"""The interface of executors, which train stages on workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from thrifty.core import UsageError
from thrifty.pack import Prefer, Task, Trainable

from ._assignment import Assignment, Report


class Executor(ABC):
    """A set of workers, each of which trains assignments and reports their events.

    A worker trains one or several assignments at a time. The reports of an assignment come in
    order, and the last one has no event. A failure of user code or of a worker is never raised, but
    reported as an event. If the store cannot write, ``poll`` raises StoreWriteError.
    """

    @abstractmethod
    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start now, with ``pack_size`` for each worker."""

    @abstractmethod
    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker with the least work."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return the new reports; wait up to ``timeout_s`` seconds if there are none."""

    def refuse(self, key: str, reason: str) -> None:
        """Tell workers not to fuse trials of a structure.

        A worker that is not told finds out by its own check.

        Args:
            key: Identifier of the structure, equal in every process.
            reason: What the check has found.
        """
        return

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to save their states at the end of the current epoch and finish."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers now; training since the last checkpoints is lost."""


class ExecutorConfig(ABC):
    """The user's frozen description of an executor; ``open`` makes the executor.

    Attributes:
        pack_size: Trials that a worker trains at a time. None: found by measurement.
        memory_margin: Fraction of a device's memory that a pack may use.
        threads: CPU threads of each worker. None: not fixed here.
        epoch_timeout: Seconds that a worker may train until an epoch ends. None: no limit.
    """

    pack_size: int | None = None
    memory_margin: float = 0.9
    threads: int | None = None
    epoch_timeout: float | None = None

    @property
    def default_threads(self) -> int | None:
        """CPU threads of each worker if ``threads`` is None; None: their number does not matter."""
        return None

    def with_threads(self, threads: int) -> ExecutorConfig:
        """Return a copy with ``threads`` CPU threads per worker; itself if they do not matter."""
        return self

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return 1

    @abstractmethod
    def open(
        self,
        task: Task | Trainable,
        *,
        checkpoints: str,
        folder: str,
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> Executor:
        """Return the executor for a task; workers save states under ``checkpoints``/``folder``.

        ``curves`` are the known pack curves (times of joint steps), by the key of ``Calibrated``.
        ``refused`` maps the structures that must not be fused to the reasons, by the key of
        ``Refused``.
        """


def check_options(config: Any) -> None:
    """Check the options that all executors share.

    Raises:
        UsageError: An option is invalid: fewer than one worker, thread or trial per pack, an
            unknown ``pack``, a ``memory_margin`` outside (0, 1], or an ``epoch_timeout`` that is
            not a positive number.
    """
    name = type(config).__name__
    margin = config.memory_margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise UsageError(f"{name}(memory_margin={margin!r}): it must be a number")
    if config.pack not in get_args(Prefer):
        raise UsageError(
            f"{name}(pack={config.pack!r}): it is one of {', '.join(map(repr, get_args(Prefer)))}"
        )
    if not 0.0 < config.memory_margin <= 1.0:
        raise UsageError(
            f"{name}(memory_margin={config.memory_margin}): a share above 0 and at most 1"
        )
    limit = config.epoch_timeout
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is not None and not (number and 0.0 < limit < math.inf):
        raise UsageError(
            f"{name}(epoch_timeout={limit!r}): it must be a finite number of seconds above 0, "
            "or None for no limit"
        )
    for option in ("workers", "threads", "pack_size"):
        value = getattr(config, option)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}({option}={value!r}): {option} must be an integer")
        if value < 1:
            raise UsageError(f"{name}({option}={value}): needs at least one")
