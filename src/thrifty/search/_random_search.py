"""Random configurations, all the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._history import Decision, History
from ._options import check_at_least, draw
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(Algorithm):
    """Trains ``num_trials`` drawn configurations for ``max_epochs`` (Bergstra and Bengio, JMLR 2012)."""

    max_epochs: int
    num_trials: int
    sampler: Sampler = RandomSampler()

    def __post_init__(self) -> None:
        check_at_least(1, max_epochs=self.max_epochs, num_trials=self.num_trials)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All trials at once: the more the plan knows, the more it shares."""
        left = self.num_trials - len(history)
        return draw(self.sampler, history, space, num=left, target=self.max_epochs, rng=rng)
