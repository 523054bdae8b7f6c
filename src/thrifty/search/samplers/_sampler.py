"""The interface of a sampler, and samplers that do not learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from thrifty.search._arguments import check_counts
from thrifty.search._history import History
from thrifty.space import Space


class Sampler(ABC):
    """Source of the configurations of new trials: a frozen dataclass of options, without state."""

    __slots__ = ()
    adapts: ClassVar[bool] = False
    """Whether it learns from results; algorithms then ask only for trials that can start now."""

    @abstractmethod
    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Return configurations of the next ``num`` trials; fewer when the sampler is exhausted.

        The answer depends on the arguments alone. A sampler that adapts makes the configurations of
        one answer differ from each other and from those in training, so that an algorithm can ask
        for a whole pack at once.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSampler(Sampler):
    """Sampler whose ``n``-th draw is the ``n``-th configuration of ``space.grid(levels=levels)``.

    It is exhausted after the last one. ``shuffle_seed`` walks through the grid in an order drawn
    from that seed, with all of the grid in memory. This is useful if there will be fewer trials
    than configurations.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> GridSampler(levels=2).sample(History(), space, num=3, rng=rng)
    [{'lr': 0.1}, {'lr': 0.3}]
    """

    levels: int = 5
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, levels=self.levels)

    def size(self, space: Space) -> int:
        """Return the number of configurations."""
        return len(_walk(space, self.levels, self.shuffle_seed))

    def sample(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Mapping[str, Any]]:
        """Return the next configurations."""
        walk = _walk(space, self.levels, self.shuffle_seed)
        return walk.get(history.num_drawn, num)


class _Walk:
    """The grid as far as it has been read, so that reading it in steps takes linear time."""

    def __init__(self, grid: Iterator[Mapping[str, Any]]) -> None:
        self._ahead = grid
        self._seen: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        self._seen.extend(self._ahead)
        return len(self._seen)

    def get(self, first: int, num: int) -> Sequence[Mapping[str, Any]]:
        self._seen.extend(islice(self._ahead, max(first + num - len(self._seen), 0)))
        return self._seen[first : first + num]


@lru_cache(maxsize=8)
def _walk(space: Space, levels: int, shuffle_seed: int | None) -> _Walk:
    """Return the walk through a space; cached by the identity of the space, which never changes."""
    grid = space.grid(levels=levels)
    if shuffle_seed is None:
        return _Walk(grid)
    configs = list(grid)
    order = np.random.default_rng(shuffle_seed).permutation(len(configs))
    return _Walk(configs[index] for index in order)


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
