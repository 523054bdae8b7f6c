"""Several studies on one plan at once, as one algorithm over one history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thrifty.core import derive_seed
from thrifty.search import Algorithm, Decision, History, Proposal, Stop
from thrifty.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several studies."""

    algorithm: Algorithm
    space: Space
    seed: int


class JointHistory(History):
    """The history of all trials, which also keeps one for each study, as that study alone would have it.

    Whatever is recorded goes into both; ``Trial.group`` is the study and the group there.
    """

    def __init__(self, num_studies: int, *, max_epochs: int) -> None:
        super().__init__(max_epochs=max_epochs)
        self.parts = [History(max_epochs=max_epochs) for _ in range(num_studies)]
        self._places: list[tuple[int, int]] = []
        """For each trial its study and its number there."""
        self._numbers: list[list[int]] = [[] for _ in range(num_studies)]
        """For each study the numbers of its trials here."""

    def joint(self, study: int, decision: Decision) -> Decision:
        """What a study has decided, in the terms of this history."""
        numbers = self._numbers[study]
        if decision.trial is not None:
            return replace(decision, trial=numbers[decision.trial])
        assert isinstance(decision, Proposal)
        parent = decision.parent
        if parent is not None:
            parent = numbers[parent[0]], parent[1]
        return replace(decision, group=(study, decision.group), parent=parent)

    def record_decision(self, decision: Decision) -> int:
        """Takes note of a decision, here and in its study."""
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
        """A trial reached its target, here and in its study."""
        super().record_scores(number, scores, objectives=objectives, violation=violation)
        if self[number].state == "failed":
            return  # so bad that it was recorded as a failure, in both
        study, own = self._places[number]
        self.parts[study].record_scores(own, scores, objectives=objectives, violation=violation)

    def record_failure(self, number: int) -> None:
        """A trial will not reach its target, here and in its study."""
        super().record_failure(number)
        study, own = self._places[number]
        self.parts[study].record_failure(own)


class JointAlgorithm(Algorithm):
    """Asks each study for its share of the free workers; each sees its own history and draws its own numbers."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.max_epochs = members[0].algorithm.max_epochs
        self._members = tuple(members)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """What all studies have to say."""
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
