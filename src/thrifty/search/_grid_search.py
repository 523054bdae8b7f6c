"""Grid search: every configuration, fully trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts
from ._draw import draw
from ._history import Decision, History
from ._samplers import GridSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSearch(Algorithm):
    """Grid search: trains every configuration of the grid for ``max_epochs``.

    Intervals are thinned to ``levels`` values.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> asked = GridSearch(max_epochs=9, levels=3).ask(History(), space, num=1, rng=rng)
    >>> [(proposal.config["lr"], proposal.target) for proposal in asked]
    [(0.1, 9), (0.2, 9), (0.3, 9)]
    """

    max_epochs: int
    levels: int = 5

    def __post_init__(self) -> None:
        check_counts(self, max_epochs=self.max_epochs, levels=self.levels)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """Return all configurations of the grid that are not in the history yet."""
        sampler = GridSampler(levels=self.levels)
        num_left = sampler.size(space) - history.num_drawn + history.num_enqueued
        starts = repeat((0, self.max_epochs), num_left)
        return draw(sampler, history, space, starts=starts, num=num, rng=rng)
