"""One worker in the calling process: no start-up, no messages, and the easiest to debug."""

from __future__ import annotations

from collections.abc import Sequence

from ._assignment import Assignment, Report
from ._executor import Executor
from ._worker import Worker


class InlineExecutor(Executor):
    """An executor that trains inside ``poll``, one epoch at a time."""

    def __init__(self, worker: Worker, *, stop_flag: list[bool]) -> None:
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

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Train until at least one epoch has ended, and return the reports."""
        return self._worker.advance()

    def stop(self) -> None:
        """Ask the worker to save its states at the end of the current epoch and finish."""
        self._stop_flag[0] = True

    def close(self) -> None:
        """Stop the worker."""
        self._worker.close()
