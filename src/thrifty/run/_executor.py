"""The interface of an executor: where stages are trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from thrifty.pack import Task, Trainable

from ._assignment import Assignment, Report


class Executor(ABC):
    """Has some workers; each trains one assignment at a time and reports what happens.

    For each assignment the reports come in order, the last one has no event, and no
    failure of user code or of a worker is ever raised: it is reported as an event. What the store
    cannot write is raised from ``poll`` as StoreWriteError.
    """

    @abstractmethod
    def num_free(self) -> int:
        """How many workers are idle."""

    @abstractmethod
    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to an idle worker."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What has happened since, waiting up to ``timeout_s`` seconds for something to happen."""

    @abstractmethod
    def stop(self) -> None:
        """Asks all workers to keep their present state at the next epoch's end and be through."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers now; what they were training is lost back to the last checkpoint."""


class ExecutorConfig(ABC):
    """Says how to train; ``open`` makes the executor. A frozen value that users write."""

    @abstractmethod
    def open(self, task: Task | Trainable, *, checkpoints: str, folder: str) -> Executor:
        """The executor for a task; workers keep states under ``checkpoints``/``folder``."""
