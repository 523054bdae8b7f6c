"""One worker in this very process: no start-up, no messages, the easiest to debug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thrifty.core import Event

from ._assignment import Assignment, Report
from ._executor import Executor
from ._worker import Worker


class InlineExecutor(Executor):
    """Trains inside ``poll``, one event at a time."""

    def __init__(self, worker: Worker, *, stop_flag: list[bool]) -> None:
        self._worker = worker
        self._stop_flag = stop_flag
        self._current: tuple[int, Iterator[Event]] | None = None

    def num_free(self) -> int:
        """How many workers are idle."""
        return int(self._current is None)

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker."""
        assert self._current is None, "the worker is busy"
        self._current = (assignment.number, self._worker.run(assignment))

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Trains up to the next event."""
        if self._current is None:
            return []
        number, events = self._current
        event = next(events, None)
        if event is None:
            self._current = None
        return [Report(assignment=number, event=event)]

    def stop(self) -> None:
        """Asks the worker to keep its present state at the next epoch's end and be through."""
        self._stop_flag[0] = True

    def close(self) -> None:
        """Ends the worker."""
        self._current = None
        self._worker.close()
