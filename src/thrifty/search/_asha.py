"""Asynchronous successive halving."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._algorithm import Algorithm
from ._history import Decision, History, Proposal
from ._options import check_at_least, draw, rungs
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class ASHA(Algorithm):
    """A worker that is free takes the best trial that may go on, else a new one: nobody waits for a rung.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2. A trial may go on when
    it is among the best ``1 / eta`` of those that have reached its rung so far; one that may
    not yet waits, and goes on from where it stands. With several workers the outcome depends on their timing.
    """

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    sampler: Sampler = RandomSampler()

    def __post_init__(self) -> None:
        check_at_least(1, num_trials=self.num_trials, min_epochs=self.min_epochs)
        check_at_least(2, eta=self.eta)
        if self.max_epochs < self.min_epochs:
            raise AlgorithmError(
                f"max_epochs is {self.max_epochs}; it must be at least min_epochs ({self.min_epochs})"
            )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Promotions, highest rung first, then new trials; at most ``num``."""
        epochs = rungs(self.min_epochs, self.max_epochs, eta=self.eta)
        decisions: list[Decision] = []
        for at, target in reversed(list(itertools.pairwise(epochs))):
            board, waiting = history.leaderboard(at), history.waiting(at)
            quota = len(board) // self.eta
            for entry in itertools.islice(waiting, max(num - len(decisions), 0)):
                if board.rank(entry) >= quota:
                    break
                decisions.append(Proposal(target=target, trial=entry[1]))
        fresh = min(num - len(decisions), self.num_trials - len(history))
        return [
            *decisions,
            *draw(self.sampler, history, space, num=fresh, target=epochs[0], rng=rng),
        ]
