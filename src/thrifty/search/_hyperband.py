"""Hyperband: successive halving in several brackets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._brackets import Bracket, ask_brackets, brackets_of
from ._check import check_counts, check_halving
from ._draw import check_sampler
from ._history import Decision, History
from ._rungs import Halving
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperband(Algorithm):
    """Successive halving in brackets, from many trials that start short to few trained fully.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018,
    algorithm 1. All brackets are proposed at once and halved independently; with a sampler that
    learns from results, they are proposed one after the other. ``Trial.group`` is the bracket. With
    ``num_trials``, the brackets repeat, from the widest on, until that many trials are drawn; the
    last one is cut short.

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
        """Return the brackets, widest first; with ``num_trials``, as many as it needs."""
        return brackets_of(self.max_epochs, eta=self.eta, num_trials=self.num_trials)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the verdicts on complete rungs."""
        return ask_brackets(
            self.brackets(),
            Halving(eta=self.eta),
            sampler=self.sampler,
            history=history,
            space=space,
            num=num,
            rng=rng,
        )
