"""One configuration of the grid after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from thrifty.search._check import check_counts
from thrifty.search._history import History
from thrifty.space import Space

from ._base import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSampler(Sampler):
    """Trial ``n`` gets the ``n``-th configuration of ``space.grid(levels=levels)``; exhausted after the last.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> [GridSampler(levels=2).sample(History(), space, number=n, rng=rng) for n in range(3)]
    [{'lr': 0.1}, {'lr': 0.3}, None]

    ``shuffle_seed`` goes through the grid in an order drawn from that seed (all of the grid is then held in
    memory): of value where there will be fewer trials than configurations.
    """

    levels: int = 5
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, levels=self.levels)

    def sample(
        self,
        history: History,
        space: Space,
        *,
        number: int,
        rng: np.random.Generator,
    ) -> Mapping[str, Any] | None:
        """The ``number``-th configuration."""
        return _walk(space, self.levels, self.shuffle_seed).get(number)


class _Walk:
    """The grid as far as somebody has asked, so that asking for one after the other is linear."""

    def __init__(self, grid: Iterator[Mapping[str, Any]]) -> None:
        self._ahead = grid
        self._seen: list[Mapping[str, Any]] = []

    def get(self, number: int) -> Mapping[str, Any] | None:
        self._seen.extend(islice(self._ahead, max(number + 1 - len(self._seen), 0)))
        return self._seen[number] if number < len(self._seen) else None


@lru_cache(maxsize=8)
def _walk(space: Space, levels: int, shuffle_seed: int | None) -> _Walk:
    """Remembered by the identity of the space, which never changes."""
    grid = space.grid(levels=levels)
    if shuffle_seed is None:
        return _Walk(grid)
    configs = list(grid)
    order = np.random.default_rng(shuffle_seed).permutation(len(configs))
    return _Walk(configs[index] for index in order)
