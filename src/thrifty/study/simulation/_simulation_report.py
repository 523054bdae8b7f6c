"""The report of a simulated study, and lower bounds of its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.plan import Node, SearchPlan
from thrifty.search import History
from thrifty.space import MultiStep, Timeline


WHOSE = "(trial)"
"""A hyper-parameter name that no space can use; its value is the trial that owns an epoch."""


class UnsharedPlan(SearchPlan):
    """A plan in which every trial has its own timeline, so that nothing merges.

    A trial that branches off another one (population-based training) continues from it there, as in
    any plan. ``history`` is the history of the study: it says which trial branches off which.
    Trials of ``num_seeds`` replicas insert these in order, one after the other.

    >>> plan = UnsharedPlan(History())
    >>> (plan.insert(Timeline({"lr": 0.1}, epochs=9)), plan.insert(Timeline({"lr": 0.1}, epochs=9)))
    (0, 1)
    >>> plan.original(plan.nodes[1].timeline)
    Timeline({'lr': 0.1}, epochs=9)
    """

    def __init__(self, history: History, *, num_seeds: int = 1) -> None:
        super().__init__()
        self._history = history
        self._num_seeds = num_seeds
        self._originals: list[Timeline] = []
        self._lines: list[tuple[tuple[int, int], ...]] = []
        """For each replica of each trial, the owners of its training, and from which epochs."""

    def insert(self, timeline: Timeline) -> int:
        """Return the node of the next replica of a trial."""
        own = len(self._lines)
        number, replica = divmod(own, self._num_seeds)
        trial = self._history[number] if number < len(self._history) else None
        parent = None if trial is None else trial.parent
        line: tuple[tuple[int, int], ...] = ((0, own),)
        if parent is not None:
            donor, epoch = parent
            before = self._lines[donor * self._num_seeds + replica]
            line = (*(part for part in before if part[0] < epoch), (epoch, own))
        self._lines.append(line)
        self._originals.append(timeline)
        config = {**timeline.config, WHOSE: _schedule(line)}
        return super().insert(Timeline(config, epochs=timeline.epochs, replica=timeline.replica))

    def original(self, timeline: Timeline) -> Timeline:
        """Return the timeline that was inserted as ``timeline``."""
        whose = timeline.config[WHOSE]
        return self._originals[whose if isinstance(whose, int) else whose.levels[-1]]


def _schedule(line: Sequence[tuple[int, int]]) -> Any:
    starts, whose = zip(*line, strict=True)
    return whose[0] if len(whose) == 1 else MultiStep(whose, milestones=starts[1:])


FloatArray = npt.NDArray[np.float64]


def least_s(
    plan: SearchPlan, *, seconds_of: Callable[[Timeline, int], float], slowdowns: Sequence[float]
) -> float:
    """Return a lower bound on the time for the trained epochs of a plan, in any order.

    It is the largest of:

    - the time of all work, shared evenly;
    - the time of the longest path;
    - for each length of time, that time plus all work that cannot begin before it is over, shared
      evenly (after Fernandez and Bussell).

    The bound includes neither faults nor the time to load states or to wait for the algorithm: it
    assumes that all decisions are known in advance. Counting time from the end as
    well would add nothing, because a tree only gets wider.

    Args:
        plan: The plan with the trained epochs.
        seconds_of: Gives the seconds of an epoch of a timeline on a worker that is not slow.
        slowdowns: The factor by which each worker is slower.

    >>> from thrifty.core import EpochDone
    >>> plan = SearchPlan()
    >>> for width in (1, 2, 4):
    ...     node = plan.insert(Timeline({"width": width}, epochs=width))
    ...     for epoch in range(1, width + 1):
    ...         _ = plan.record(
    ...             EpochDone(node=node, epoch=epoch, metrics={}, seconds=0.0, worker="")
    ...         )
    >>> [
    ...     least_s(plan, seconds_of=lambda timeline, epoch: 10.0, slowdowns=[1.0] * n)
    ...     for n in (1, 2, 3)
    ... ]
    [70.0, 40.0, 40.0]

    References:
        Fernandez and Bussell, "Bounds on the Number of Processors and Time for Multiprocessor
        Optimal Schedules", 1973.
    """
    costs = [_costs(node, seconds_of) for node in plan.nodes]
    heads = _heads(plan, costs)
    work = np.concatenate([np.zeros(0), *costs])
    if not work.size:
        return 0.0
    speed = sum(1.0 / slowdown for slowdown in slowdowns)
    quickest = min(slowdowns)
    heads *= quickest
    longest = float(np.max(heads + work * quickest))
    order = np.argsort(-heads, kind="stable")
    not_before = heads[order] + np.cumsum(work[order]) / speed
    return max(longest, float(np.max(not_before)))


def _costs(node: Node, seconds_of: Callable[[Timeline, int], float]) -> FloatArray:
    """Return the seconds of each epoch that was trained on a node, in order."""
    last = max(node.metrics, default=node.start)
    return np.array([seconds_of(node.timeline, e) for e in range(node.start + 1, last + 1)])


def _heads(plan: SearchPlan, costs: Sequence[FloatArray]) -> FloatArray:
    """Return the time that must pass before each epoch can begin."""
    ends: list[FloatArray] = []
    out = [np.zeros(0)]
    for node, cost in zip(plan.nodes, costs, strict=True):
        begin = 0.0
        if node.parent is not None and cost.size:
            begin = float(ends[node.parent.id][node.start - node.parent.start])
        ends.append(begin + np.concatenate([[0.0], np.cumsum(cost)]))
        out.append(ends[-1][:-1])
    return np.concatenate(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTimes:
    """Real seconds per decision of the loop, from polling free workers to the next assignment.

    >>> DecisionTimes.of([0.001, 0.003, 0.002]).median
    0.002
    """

    num: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> DecisionTimes:
        """Summarise the times of the given decisions."""
        if not len(seconds):
            return cls(num=0, median=0.0, p99=0.0, max=0.0)
        median, p99 = np.percentile(seconds, [50, 99])
        return cls(num=len(seconds), median=float(median), p99=float(p99), max=max(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of simulating one or several studies; print it for a summary.

    Attributes:
        workers: The number of workers.
        shared: Whether equal prefixes were trained once.
        end_to_end_s: Seconds from the first decision to the last result.
        busy_s: Busy seconds of all workers together, including loading states and lost work.
        bound_s: The least seconds in which any scheduler could have done this training, had it
            known all decisions in advance.
        num_trials: The number of trials of all studies together.
        num_failed: Trials that failed because their workers were lost too often.
        trial_epochs: Epochs that the trials have reached, each trial counted separately.
        unique_epochs: Epochs that were needed for that.
        epochs_redone: Epochs that were trained again because a worker was lost.
        failures: Failures of workers, busy or not.
        preemptions: Preemptions of workers, busy or not.
        kept_bytes: Bytes of all checkpoints at the end.
        best_value: The value of the best trial at the epoch that it has reached.
        decision_s: Real time of the decisions.
        driver_s: Real seconds of the whole loop: decisions, ledger and records.
    """

    workers: int
    shared: bool
    end_to_end_s: float
    busy_s: float
    bound_s: float
    num_trials: int
    num_failed: int
    trial_epochs: int
    unique_epochs: int
    epochs_redone: int
    failures: int
    preemptions: int
    kept_bytes: int
    best_value: float | None
    decision_s: DecisionTimes = field(compare=False)
    driver_s: float = field(compare=False)

    @property
    def utilisation(self) -> float:
        """Share of the workers' time in which they were busy."""
        return self.busy_s / (self.workers * self.end_to_end_s) if self.end_to_end_s else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the speed that any scheduler could have reached; 1: none could be faster."""
        return self.bound_s / self.end_to_end_s if self.end_to_end_s else 1.0

    @property
    def merge_rate(self) -> float:
        """Trial-epochs per epoch that was needed; at least 1."""
        return self.trial_epochs / max(self.unique_epochs, 1)

    def __str__(self) -> str:
        kind = "equal prefixes trained once" if self.shared else "each trial by itself"
        lost = f", {self.num_failed:,} failed" if self.num_failed else ""
        again = f", {self.epochs_redone:,} trained again" if self.epochs_redone else ""
        best = "" if self.best_value is None else f"; the best: {self.best_value:.4g}"
        times = self.decision_s
        faults = ""
        if self.failures or self.preemptions:
            faults = f"\nfaults: {self.failures:,} failures, {self.preemptions:,} preemptions"
        return (
            f"{self.workers:,} workers, {kind}\n"
            f"end to end: {_duration(self.end_to_end_s)}, "
            f"lower bound {_duration(self.bound_s)} ({self.efficiency:.0%} reached)\n"
            f"busy: {self.busy_s / 3600:,.2f} worker-hours (utilisation {self.utilisation:.0%})\n"
            f"trials: {self.num_trials:,}{lost}{best}\n"
            f"epochs: {self.unique_epochs:,} for {self.trial_epochs:,} trial-epochs "
            f"(merge rate {self.merge_rate:.2f}){again}{faults}\n"
            f"driver {self.driver_s:.1f} s; decisions: median {times.median * 1e3:.2f} ms, "
            f"p99 {times.p99 * 1e3:.2f} ms, max {times.max * 1e3:.1f} ms"
        )


def _duration(seconds: float) -> str:
    """Format a duration in two units at most.

    >>> _duration(42.0), _duration(200.0), _duration(5000.0), _duration(200_000.0)
    ('42.0 s', '3 min 20 s', '1 h 23 min', '2 d 8 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    large, small, unit_s, in_large, _ = next(
        unit for unit in _UNITS if round(seconds / unit[2]) < unit[4]
    )
    whole = round(seconds / unit_s)
    return f"{whole // in_large:,} {large} {whole % in_large} {small}"


_UNITS = (("min", "s", 1, 60, 3600), ("h", "min", 60, 60, 24 * 60), ("d", "h", 3600, 24, math.inf))
"""Large and small unit, seconds in the small one, small ones per large one, upper limit."""
