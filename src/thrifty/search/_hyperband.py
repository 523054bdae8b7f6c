"""Hyperband."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History
from ._rungs import halve
from ._samplers import RandomSampler, Sampler


class Bracket(NamedTuple):
    """``num_trials`` that start together and are compared after each of ``epochs``."""

    num_trials: int
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperband(Algorithm):
    """Successive halving in several brackets, from many trials that start short to few that are trained fully.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018, algorithm 1.
    All brackets are proposed at once and halved independently; ``Trial.group`` is the bracket. With ``num_trials`` the
    brackets repeat, from the widest on, until so many trials are drawn; the last one is cut short.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in Hyperband(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (5, (3, 9)), (3, (9,))]
    """

    max_epochs: int
    eta: int = 3
    num_trials: int | None = None
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_halving(self, eta=self.eta, min_epochs=1, max_epochs=self.max_epochs)
        if self.num_trials is not None:
            check_counts(self, num_trials=self.num_trials)
        check_sampler(self, self.sampler)

    def brackets(self) -> tuple[Bracket, ...]:
        """The brackets, widest first; with ``num_trials`` as many as it needs."""
        return tuple(self._brackets())

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All trials that are not in the history yet, or the verdicts on the rungs that are complete."""
        brackets = self.brackets()
        starts = (
            (group, rungs[0])
            for group, (size, rungs) in enumerate(brackets)
            for _ in range(len(history.in_group(group)), size)
        )
        fresh = draw(self.sampler, history, space, starts=starts, rng=rng)
        if fresh:
            return fresh
        return [
            decision
            for group, (_, rungs) in enumerate(brackets)
            for decision in halve(history, rungs, eta=self.eta, group=group)
        ]

    def _brackets(self) -> Iterator[Bracket]:
        once = self._standard_brackets()
        if self.num_trials is None:
            yield from once
            return
        left = self.num_trials
        for size, rungs in cycle(once):
            yield Bracket(min(size, left), rungs)
            left -= size
            if left <= 0:
                return

    def _standard_brackets(self) -> list[Bracket]:
        """The paper's, in whole numbers: ``log(243, 3)`` is 4.999... in floating point."""
        widest = 0
        while self.eta ** (widest + 1) <= self.max_epochs:
            widest += 1
        return [
            Bracket(
                -(-(widest + 1) * self.eta**s // (s + 1)),
                tuple(self.max_epochs // self.eta**i for i in range(s, -1, -1)),
            )
            for s in range(widest, -1, -1)
        ]
