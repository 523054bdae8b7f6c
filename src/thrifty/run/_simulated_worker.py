"""Simulated workers, their virtual clock, and counts of what they do."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from thrifty.core import Event, derive_seed
from thrifty.plan import Stage

from ._assignment import Assignment, Report
from ._faults import Faults, Times


class SimulatedClock:
    """A virtual clock that advances only from event to event.

    >>> clock = SimulatedClock()
    >>> clock.pass_until(90.0)
    >>> clock.now(), clock.monotonic()
    (90.0, 90.0)
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def pass_until(self, moment: float) -> None:
        """Advance the clock to ``moment``."""
        assert moment >= self._now
        self._now = moment


@dataclass(slots=True)
class Counts:
    """Counts of what simulated workers have done so far.

    Attributes:
        epochs: Epochs that were trained to their end; an epoch trained twice counts twice.
        busy_s: Busy seconds of all workers together, including loading states and lost work.
        failures: Failures of workers, busy or idle.
        preemptions: Announced preemptions.
        decisions_s: Real seconds of each scheduling decision: from the query for free workers to
            the next assignment, or to the next poll if there is none.
    """

    epochs: int = 0
    busy_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    decisions_s: array[float] = field(default_factory=lambda: array("d"))


class Course:
    """The progress of an assignment."""

    __slots__ = ("_index", "assignment", "epoch", "seconds", "stages", "timeline")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.stages = assignment.chain.stages
        self.timeline = assignment.chain.timeline
        self._index = 0
        self.epoch = self.stage.start
        self.seconds = 0.0
        """Seconds that the current epoch takes."""

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.stages[self._index]

    def next_stage(self) -> bool:
        """Move to the next stage; return False if there is none."""
        self._index += 1
        return self._index < len(self.stages)

    def report(self, event: Event | None) -> Report:
        """Return a report of an event of this assignment."""
        return Report(assignment=self.assignment.number, event=event)


class SimulatedWorker:
    """One worker, its current assignment, and the random times of its failures and preemptions.

    ``life`` counts how often the worker was gone. Events scheduled in an earlier life are ignored.
    """

    __slots__ = (
        "asked_to_stop",
        "began",
        "course",
        "failures",
        "free",
        "life",
        "name",
        "preemptions",
        "slowdown",
    )

    def __init__(self, number: int, *, slowdown: float, faults: Faults, seed: int) -> None:
        self.name = f"simulated-{number}"
        self.slowdown = slowdown
        self.life = 0
        self.course: Course | None = None
        self.began = 0.0
        """When the worker got its current assignment."""
        self.free = False
        self.asked_to_stop = False
        self.failures = Times(
            faults.mean_between_failures_s, seed=derive_seed(seed, "failures", number)
        )
        self.preemptions = Times(
            faults.mean_between_preemptions_s, seed=derive_seed(seed, "preemptions", number)
        )
