"""Sampler with independent draws from a thinned space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.search._check import check_counts
from thrifty.search._history import History
from thrifty.space import Space

from ._base import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class GriddedSampler(Sampler):
    """Draws each configuration after thinning every interval to ``levels`` values; never exhausted.

    Two draws from an interval never coincide, so they cannot share any training. Draws from a few
    of its values do (Li et al., "Exploiting Reuse in Pipeline-Aware Hyperparameter Tuning", 2019).

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.4)), np.random.default_rng(0)
    >>> GriddedSampler(levels=4).sample(History(), space, num=1, rng=rng)
    [{'lr': 0.4}]
    """

    levels: int = 4

    def __post_init__(self) -> None:
        check_counts(self, levels=self.levels)

    def sample(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        return [space.sample(rng, levels=self.levels) for _ in range(num)]
