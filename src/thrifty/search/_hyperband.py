"""Hyperband."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._halving import advance
from ._history import Decision, History, Proposal
from ._options import check_at_least, draw
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperband(Algorithm):
    """Successive halving in several brackets, from many short trials to few long ones.

    Li, Jamieson, DeSalvo, Rostamizadeh and Talwalkar, "Hyperband", JMLR 18(185), 2018, algorithm 1. All
    brackets are open at once, so their trials share stages. With ``num_trials`` the brackets are repeated from the
    widest on until so many trials are drawn; the last one may be cut short.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in Hyperband(max_epochs=9).brackets()]
    [(9, [1, 3, 9]), (5, [3, 9]), (3, [9])]
    """

    max_epochs: int
    eta: int = 3
    num_trials: int | None = None
    sampler: Sampler = RandomSampler()

    def __post_init__(self) -> None:
        check_at_least(1, max_epochs=self.max_epochs)
        check_at_least(2, eta=self.eta)
        if self.num_trials is not None:
            check_at_least(1, num_trials=self.num_trials)

    def brackets(self) -> list[Bracket]:
        """The brackets, widest first."""
        cycle = list(self._cycle())
        if self.num_trials is None:
            return cycle
        out: list[Bracket] = []
        left = self.num_trials
        while left:
            bracket = cycle[len(out) % len(cycle)]
            out.append(Bracket(min(bracket.num_trials, left), bracket.epochs))
            left -= out[-1].num_trials
        return out

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All trials of all brackets at first, then what follows from each finished rung."""
        if len(history) == 0:
            return self._open(history, space, rng)
        decisions: list[Decision] = []
        for index, bracket in enumerate(self.brackets()):
            decisions += advance(history, bracket.epochs, eta=self.eta, group=index)
        return decisions

    def _open(self, history: History, space: Space, rng: np.random.Generator) -> list[Proposal]:
        proposals: list[Proposal] = []
        for index, bracket in enumerate(self.brackets()):
            proposals += draw(
                self.sampler,
                history,
                space,
                num=bracket.num_trials,
                target=bracket.epochs[0],
                rng=rng,
                group=index,
                after=len(proposals),
            )
        return proposals

    def _cycle(self) -> Iterator[Bracket]:
        # whole numbers throughout: log(243, 3) is 4.999... in floating point
        most = 0
        while self.eta ** (most + 1) <= self.max_epochs:
            most += 1
        for s in range(most, -1, -1):
            num_trials = -(-(most + 1) * self.eta**s // (s + 1))
            epochs = [max(self.max_epochs // self.eta ** (s - i), 1) for i in range(s + 1)]
            yield Bracket(num_trials, epochs)


@dataclass(frozen=True, slots=True)
class Bracket:
    """``num_trials`` that start together and are judged after ``epochs``."""

    num_trials: int
    epochs: list[int]
