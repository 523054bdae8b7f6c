"""Synchronous successive halving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History
from ._rungs import halve, rungs_between
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessiveHalving(Algorithm):
    """Trains all trials briefly, then promotes the best ``1 / eta`` at each rung.

    Promoted trials train ``eta`` times as long. Jamieson and Talwalkar, "Non-stochastic Best Arm
    Identification and Hyperparameter Optimization", AISTATS 2016, algorithm 1. A rung of ``n``
    trials keeps its best ``n // eta`` (at least one) once all have reached it. A failed trial
    counts as having reached it, and as the worst.

    >>> halving = SuccessiveHalving(max_epochs=81, num_trials=81)
    >>> halving.rungs()
    (1, 3, 9, 27, 81)
    """

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(self, num_trials=self.num_trials)
        check_halving(
            self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs
        )
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs at which trials are compared; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the verdict on a complete rung."""
        rungs = self.rungs()
        starts = repeat((0, rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return fresh or halve(history, rungs, eta=self.eta)
