"""A simulated worker, the clock it lives by, and what is counted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from thrifty.core import Event, derive_seed
from thrifty.plan import Stage

from ._assignment import Assignment, Report
from ._faults import Faults, Times


class SimulatedClock:
    """Time that passes only from event to event.

    >>> clock = SimulatedClock()
    >>> clock.pass_until(90.0)
    >>> clock.now(), clock.monotonic()
    (90.0, 90.0)
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def pass_until(self, moment: float) -> None:
        """Lets time pass."""
        assert moment >= self._now
        self._now = moment


@dataclass(slots=True)
class Counts:
    """What simulated workers have done so far.

    Attributes:
        epochs: that were trained to their end, each time counted.
        busy_s: of all workers together, with loading states and with what was lost.
        failures: of workers, busy or not.
        preemptions: that were announced.
        decisions_s: real seconds from asking who is free to the next assignment, or to knowing that there is none.
    """

    epochs: int = 0
    busy_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    decisions_s: array[float] = field(default_factory=lambda: array("d"))


class Course:
    """An assignment on its way: where it stands."""

    __slots__ = ("_index", "assignment", "epoch", "seconds", "stages", "timeline")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.stages = assignment.chain.stages
        self.timeline = assignment.chain.timeline
        self._index = 0
        self.epoch = self.stage.start
        self.seconds = 0.0
        """Of the epoch under way."""

    @property
    def stage(self) -> Stage:
        """The stage that it is at."""
        return self.stages[self._index]

    def next_stage(self) -> bool:
        """Goes on to the next stage; False if there is none."""
        self._index += 1
        return self._index < len(self.stages)

    def report(self, event: Event | None) -> Report:
        """A report on this assignment."""
        return Report(assignment=self.assignment.number, event=event)


class SimulatedWorker:
    """One worker, what it is doing, and when it will be gone.

    ``life`` counts how often it was gone: what was foreseen for an earlier life does not happen.
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
        """When it was given its course."""
        self.free = False
        self.asked_to_stop = False
        self.failures = Times(
            faults.mean_between_failures_s, seed=derive_seed(seed, "failures", number)
        )
        self.preemptions = Times(
            faults.mean_between_preemptions_s, seed=derive_seed(seed, "preemptions", number)
        )
