"""Every configuration, all the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._history import Decision, History
from ._options import check_at_least, draw
from ._samplers import GridSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSearch(Algorithm):
    """Trains every configuration of the grid for ``max_epochs``; intervals are thinned to ``levels`` values.

    >>> from thrifty.space import Choice
    >>> space = Space(lr=Choice([0.1, 0.2]))
    >>> asked = GridSearch(max_epochs=9).ask(History(), space, num=1, rng=np.random.default_rng(0))
    >>> [(proposal.config, proposal.target) for proposal in asked]
    [({'lr': 0.1}, 9), ({'lr': 0.2}, 9)]
    """

    max_epochs: int
    levels: int = 5

    def __post_init__(self) -> None:
        check_at_least(1, max_epochs=self.max_epochs, levels=self.levels)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All of the grid that is not there yet."""
        sampler = GridSampler(levels=self.levels)
        return draw(sampler, history, space, num=_ALL, target=self.max_epochs, rng=rng)


_ALL = 10**9
"""More trials than anyone has: the sampler runs out first."""
