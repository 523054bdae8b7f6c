"""Learning curves to simulate with, and the report of simulations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from thrifty.core import derive_seed
from thrifty.search import Algorithm, Decision, History, Proposal, Stop
from thrifty.space import Space, Timeline
from thrifty.study._goals import Mode


_HALF_WAY = 5.0
"""Progress (at most 1 per epoch) at which the metric is half way to its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpCurve:
    """A metric that improves with each epoch.

    The values of the hyper-parameters in an epoch determine how fast it improves: the speed is
    random, but always the same for the same values. The metric depends only on the epochs so far,
    so timelines with a common prefix agree there.

    >>> from thrifty.space import Constant, Step
    >>> curve = MadeUpCurve(metric="accuracy", mode="max")
    >>> one, other = (Timeline({"lr": lr}, epochs=9) for lr in (Constant(0.1), Step(0.1, [3])))
    >>> curve(one, 3, 0) == curve(other, 3, 0), curve(one, 4, 0) == curve(other, 4, 0)
    (True, False)
    """

    metric: str
    mode: Mode

    def __call__(self, timeline: Timeline, epoch: int, seed: int) -> dict[str, float]:
        """Return the metric after ``epoch`` epochs."""
        progress = 0.0
        for run in timeline.runs:
            if run.start >= epoch:
                break
            progress += (min(run.stop, epoch) - run.start) * _speed(run.key, seed)
        reached = progress / (progress + _HALF_WAY)
        return {self.metric: reached if self.mode == "max" else 1.0 - reached}


@lru_cache(maxsize=65536)
def _speed(values: Hashable, seed: int) -> float:
    return derive_seed(seed, "speed", repr(values)) / 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several studies."""

    algorithm: Algorithm
    space: Space
    seed: int


class JointHistory(History):
    """The history of all trials, which also keeps a separate history for each study.

    Everything is recorded in both. ``Trial.group`` holds the study and the group in that study.
    """

    def __init__(self, num_studies: int, *, max_epochs: int) -> None:
        super().__init__(max_epochs=max_epochs)
        self.parts = [History(max_epochs=max_epochs) for _ in range(num_studies)]
        self._places: list[tuple[int, int]] = []
        """For each trial, its study and its number in that study."""
        self._numbers: list[list[int]] = [[] for _ in range(num_studies)]
        """For each study, the joint numbers of its trials."""

    def joint(self, study: int, decision: Decision) -> Decision:
        """Return a study's decision in terms of the joint history."""
        numbers = self._numbers[study]
        if decision.trial is not None:
            return replace(decision, trial=numbers[decision.trial])
        assert isinstance(decision, Proposal)
        parent = decision.parent
        if parent is not None:
            parent = numbers[parent[0]], parent[1]
        return replace(decision, group=(study, decision.group), parent=parent)

    def record_decision(self, decision: Decision) -> int:
        """Record a decision in this history and in its study's history."""
        number = super().record_decision(decision)
        if isinstance(decision, Stop) or decision.trial is not None:
            study, own = self._places[number]
            self.parts[study].record_decision(replace(decision, trial=own))
            return number
        study, group = _study_and_group(decision.group)
        parent = decision.parent
        if parent is not None:
            parent = self._places[parent[0]][1], parent[1]
        own = self.parts[study].record_decision(replace(decision, group=group, parent=parent))
        self._places.append((study, own))
        self._numbers[study].append(number)
        return number

    def record_scores(
        self,
        number: int,
        scores: Sequence[float],
        *,
        objectives: Sequence[float] = (),
        violation: float = 0.0,
    ) -> None:
        """Record that a trial has reached its target, here and in its study's history."""
        super().record_scores(number, scores, objectives=objectives, violation=violation)
        if self[number].state == "failed":
            return  # not finite: recorded as a failure in both histories
        study, own = self._places[number]
        self.parts[study].record_scores(own, scores, objectives=objectives, violation=violation)

    def record_failure(self, number: int) -> None:
        """Record that a trial will not reach its target, here and in its study's history."""
        super().record_failure(number)
        study, own = self._places[number]
        self.parts[study].record_failure(own)


class JointAlgorithm(Algorithm):
    """Several algorithms as one: each study is asked for its share of the free workers.

    Each study sees only its own history and has its own random stream.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.max_epochs = members[0].algorithm.max_epochs
        self._members = tuple(members)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return the decisions of all studies."""
        assert isinstance(history, JointHistory)
        share = -(-num // len(self._members))
        out: list[Decision] = []
        for study, member in enumerate(self._members):
            own = history.parts[study]
            decisions = member.algorithm.ask(
                own,
                member.space,
                num=share,
                rng=np.random.default_rng(derive_seed(member.seed, "ask", own.num_decisions)),
            )
            out += [history.joint(study, decision) for decision in decisions]
        return out


def _study_and_group(group: Any) -> tuple[int, Any]:
    study, own = group
    return study, own


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
        best_value: The best value of the metric.
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
        lost = f", {self.num_failed:,} given up" if self.num_failed else ""
        again = f", {self.epochs_redone:,} trained again" if self.epochs_redone else ""
        best = "" if self.best_value is None else f"; the best: {self.best_value:.4g}"
        times = self.decision_s
        faults = ""
        if self.failures or self.preemptions:
            faults = f"\nfaults: {self.failures:,} failures, {self.preemptions:,} preemptions"
        return (
            f"{self.workers:,} workers, {kind}\n"
            f"end to end: {_duration(self.end_to_end_s)}, "
            f"and no scheduler could do it in less than {_duration(self.bound_s)} "
            f"({self.efficiency:.0%})\n"
            f"busy: {self.busy_s / 3600:,.2f} worker-hours (utilisation {self.utilisation:.0%})\n"
            f"trials: {self.num_trials:,}{lost}{best}\n"
            f"epochs: {self.unique_epochs:,} for {self.trial_epochs:,} trial-epochs "
            f"(merge rate {self.merge_rate:.2f}){again}{faults}\n"
            f"the driver: {self.driver_s:.1f} s; a decision {times.median * 1e3:.2f} ms "
            f"(99 of 100 at most {times.p99 * 1e3:.2f} ms, the longest {times.max * 1e3:.1f} ms)"
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


_UNITS = (
    ("min", "s", 1, 60, 3600),
    ("h", "min", 60, 60, 24 * 60),
    ("d", "h", 3600, 24, math.inf),
)
"""Large and small unit, seconds in the small one, small ones per large one, upper limit."""
