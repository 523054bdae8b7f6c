"""One worker in this very process: no start-up, no messages, the easiest to debug."""

from __future__ import annotations

from collections.abc import Sequence

from ._assignment import Assignment, Report
from ._executor import Executor
from ._worker import Worker


class InlineExecutor(Executor):
    """Trains inside ``poll``, an epoch at a time."""

    def __init__(self, worker: Worker, *, stop_flag: list[bool]) -> None:
        self._worker = worker
        self._stop_flag = stop_flag

    def num_free(self, *, pack_size: int = 1) -> int:
        """How many more assignments can start."""
        return max(0, pack_size - self._worker.num_active)

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker."""
        self._worker.submit(assignment)

    def refuse(self, key: str, reason: str) -> None:
        """Tell the worker that trials of a structure are not fused."""
        self._worker.refuse(key, reason)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Trains until something has happened."""
        return self._worker.advance()

    def stop(self) -> None:
        """Asks the worker to keep its present states at the next epoch's end and be through."""
        self._stop_flag[0] = True

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()
