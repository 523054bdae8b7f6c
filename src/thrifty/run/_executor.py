"""The interface of an executor: where stages are trained."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from thrifty.core import UsageError
from thrifty.pack import Prefer, Task, Trainable

from ._assignment import Assignment, Report


class Executor(ABC):
    """Has some workers; each trains one or several assignments at a time and reports what happens.

    For each assignment the reports come in order, the last one has no event, and no
    failure of user code or of a worker is ever raised: it is reported as an event. What the store
    cannot write is raised from ``poll`` as StoreWriteError.
    """

    @abstractmethod
    def num_free(self, *, pack_size: int = 1) -> int:
        """How many more assignments can start now, if a worker trains up to ``pack_size`` at a time."""

    @abstractmethod
    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker that has least to do."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What has happened since, waiting up to ``timeout_s`` seconds for something to happen."""

    def refuse(self, key: str, reason: str) -> None:
        """Tell workers that trials of a structure are not fused; who is not told finds out.

        Args:
            key: Names the structure in every process.
            reason: What a check has found.
        """
        return

    @abstractmethod
    def stop(self) -> None:
        """Asks all workers to keep their present states at the next epoch's end and be through."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers now; what they were training is lost back to the last checkpoint."""


class ExecutorConfig(ABC):
    """Says how to train; ``open`` makes the executor. A frozen value that users write.

    ``pack_size`` is how many trials a worker trains at a time, None if that is to be measured; ``memory_margin`` the
    share of a device's memory that a pack may take; ``threads`` how many CPU threads each worker may use, None
    if that is not to be fixed; ``epoch_timeout`` how many seconds a worker may train without the end of an epoch.
    """

    pack_size: int | None = None
    memory_margin: float = 0.9
    threads: int | None = None
    epoch_timeout: float | None = None

    @property
    def default_threads(self) -> int | None:
        """CPU threads of each worker where ``threads`` does not say; None: they do not matter."""
        return None

    def with_threads(self, threads: int) -> ExecutorConfig:
        """The same with so many CPU threads for each worker, where ``default_threads`` says that they matter."""
        return self

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
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
        """The executor for a task; workers keep states under ``checkpoints``/``folder``.

        ``curves`` is what is known of joint training, by the key of ``Calibrated``; ``refused`` are the
        structures that are not fused, with the reasons, by the key of ``Refused``.
        """


def check_options(config: Any) -> None:
    """Raises UsageError for what no executor can do: no workers, an unknown way to pack, a margin that is no share."""
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
            f"{name}(epoch_timeout={limit!r}): it must be a finite number of seconds above 0, or None for no limit"
        )
    for option in ("workers", "threads", "pack_size"):
        value = getattr(config, option)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}({option}={value!r}): {option} must be an integer")
        if value < 1:
            raise UsageError(f"{name}({option}={value}): needs at least one")
