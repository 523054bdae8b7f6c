"""Sampler with independent draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.search._history import History
from thrifty.space import Space

from ._base import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSampler(Sampler):
    """Draws each configuration from the whole space (Bergstra and Bengio, JMLR 2012).

    It is never exhausted.

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> RandomSampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]
    """

    def sample(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        return [space.sample(rng) for _ in range(num)]
