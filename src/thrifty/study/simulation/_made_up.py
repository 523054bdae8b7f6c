"""Made-up learning curves and packing of simulated trials."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
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
