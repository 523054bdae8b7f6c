"""Random search: independent draws, fully trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts
from ._draw import check_sampler, draw
from ._history import Decision, History
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(Algorithm):
    """Random search: trains ``num_trials`` configurations of a sampler for ``max_epochs``.

    Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 2012.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> len(RandomSearch(max_epochs=9, num_trials=20).ask(History(), space, num=1, rng=rng))
    20
    """

    max_epochs: int
    num_trials: int
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(self, max_epochs=self.max_epochs, num_trials=self.num_trials)
        check_sampler(self, self.sampler)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet."""
        starts = repeat((0, self.max_epochs), max(self.num_trials - len(history), 0))
        return draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
