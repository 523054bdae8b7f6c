"""Successive halving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._algorithm import Algorithm
from ._halving import advance
from ._history import Decision, History
from ._options import check_at_least, draw, rungs
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessiveHalving(Algorithm):
    """All trials start with ``min_epochs``; at each rung the best ``1 / eta`` go on ``eta`` times as far.

    Karnin, Koren and Somekh, ICML 2013; Jamieson and Talwalkar, AISTATS 2016. Synchronous: a rung is judged
    when all of it is there, so the outcome does not depend on the number of workers.

    >>> SuccessiveHalving(max_epochs=81, num_trials=81).rungs()
    [1, 3, 9, 27, 81]
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

    def rungs(self) -> list[int]:
        """The epochs at which trials are judged."""
        return rungs(self.min_epochs, self.max_epochs, eta=self.eta)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All trials at first, then what follows from each finished rung."""
        epochs = self.rungs()
        if len(history) == 0:
            return draw(
                self.sampler, history, space, num=self.num_trials, target=epochs[0], rng=rng
            )
        return advance(history, epochs, eta=self.eta, group=0)
