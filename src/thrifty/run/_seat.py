"""Bookkeeping of a worker in another process."""

from __future__ import annotations

from collections.abc import Iterable

from thrifty.core import EpochDone, Event, StageDone, StageFailed, StageStarted
from thrifty.plan import Stage

from ._assignment import Assignment, Report


class Seat:
    """One worker's assignments, their last events, and which trials may have crashed it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.assignments: dict[int, Assignment] = {}
        self._last: dict[int, Event] = {}
        self._suspects = 0
        """Number of trials still to train alone after the worker crashed with several trials.

        Training each of them alone shows which one crashes the worker.
        """

    def num_free(self, pack_size: int) -> int:
        """Return how many more assignments the worker can take."""
        return max(0, (1 if self._suspects else pack_size) - len(self.assignments))

    def take(self, assignment: Assignment) -> None:
        """Add an assignment."""
        self.assignments[assignment.number] = assignment

    def note(self, reports: Iterable[Report]) -> None:
        """Record the worker's reports."""
        for report in reports:
            if report.event is None:
                del self.assignments[report.assignment]
                self._last.pop(report.assignment, None)
                self._suspects = max(0, self._suspects - 1)
            elif isinstance(report.event, StageStarted | EpochDone | StageDone):
                self._last[report.assignment] = report.event

    def vanish(self, why: str, *, evicted: bool = False) -> list[Report]:
        """Return reports that the worker is gone and its stages have failed; drop its assignments.

        If the worker trained a single trial, that trial is lost. If it trained several, the one
        that caused the crash is unknown, so each is trained again, alone. If the worker's machine
        is gone (``evicted``), no trial is to blame.
        """
        message = f"WorkerLostError: worker {self.name} ended unexpectedly ({why})"
        return self._give_up("evicted" if evicted else "lost", message)

    def time_out(self, limit_s: float) -> list[Report]:
        """Return reports that the worker was killed because no epoch ended within the limit."""
        message = (
            f"EpochTimeoutError: no epoch has ended in {limit_s:g} s on worker {self.name}, "
            "which was killed; if epochs "
            "take so long, raise epoch_timeout"
        )
        return self._give_up("timeout", message)

    def _give_up(self, kind: str, message: str) -> list[Report]:
        alone = len(self.assignments) == 1
        evicted = kind == "evicted"
        if not alone and not evicted:
            kind = "crowded"
        reports: list[Report] = []
        for number, assignment in self.assignments.items():
            last = self._last.get(number)
            at = _stage_after(assignment, last)
            # Epochs that were reported are safe, whatever happens to the rest of the stage.
            reached = last.epoch if isinstance(last, EpochDone) else at.start
            event = StageFailed(
                node=at.node,
                start=at.start,
                stop=at.stop,
                epoch=max(at.start, reached) if kind == "timeout" else at.start,
                kind=kind,
                message=message,
                worker=self.name,
            )
            reports += [Report(assignment=number, event=event), Report(assignment=number)]
        if not evicted:
            self._suspects = max(self._suspects - 1, 0) if alone else len(self.assignments)
        self.clear()
        return reports

    def clear(self) -> None:
        """Drop all assignments."""
        self.assignments.clear()
        self._last.clear()


def _stage_after(assignment: Assignment, last: Event | None) -> Stage:
    """Return the stage at which an assignment was after its last event."""
    stages = assignment.chain.stages
    if isinstance(last, StageStarted):
        return next(s for s in stages if (s.node, s.stop) == (last.node, last.stop))
    if isinstance(last, StageDone):
        rest = [s for s in stages if s.start >= last.stop]
        return rest[0] if rest else stages[-1]
    if isinstance(last, EpochDone):
        return next(s for s in stages if s.node == last.node and s.stop >= last.epoch)
    return stages[0]
