"""The interface of a sampler, and what samplers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from thrifty.core import AlgorithmError, require
from thrifty.search._arguments import check_counts
from thrifty.search._history import History
from thrifty.space import Config, Space

from ._prefix import Picker


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


_NUM_TRIES = 5


class Source(Protocol):
    """Model that has seen the history."""

    def suggest(self) -> dict[str, Any]:
        """Return a configuration worth trying."""

    def note(self, config: Config) -> None:
        """Record that a configuration will be tried, so that the next suggestion differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestingSampler(Sampler):
    """Sampler that asks a source for untried configurations.

    The first ``num_startup`` trials are random.
    """

    adapts: ClassVar[bool] = True
    num_startup: int = 10
    share: int = 0

    @abstractmethod
    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""

    @abstractmethod
    def source(self, history: History, space: Space, rng: np.random.Generator) -> Source | None:
        """Return the model, or None as long as there is not enough to learn from."""

    def __post_init__(self) -> None:
        check_counts(self, num_startup=self.num_startup)
        if isinstance(self.share, bool) or not isinstance(self.share, int) or self.share < 0:
            raise AlgorithmError(
                f"{type(self).__name__}(share={self.share!r}): share must be the number of "
                "further suggestions "
                "to choose from, 0 or more"
            )
        self.check()

    def sample(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        source = self.source(history, space, rng)
        picker = Picker(history, share=float(self.share > 0))
        configs: list[Mapping[str, Any]] = []
        for _ in range(num):
            config = self._new(source, picker) if source else None
            if config is None:
                config = picker.draw(space, rng)
            if source:
                source.note(config)
            configs.append(config)
        return configs

    def _new(self, source: Source, picker: Picker) -> dict[str, Any] | None:
        """Return the suggestion that shares most training; None if only tried ones come up."""
        for _ in range(_NUM_TRIES):
            suggested = [source.suggest() for _ in range(1 + self.share)]
            # The source gives no acquisition values.
            picked = picker.pick(np.zeros(len(suggested)), suggested.__getitem__)
            if picked is not None:
                return picked[1]
        return None


def load(package: str) -> ModuleType:
    """Import an optional package when it is needed.

    Raises:
        MissingExtraError: it is not installed.
    """
    module: ModuleType = require(package, extra="search")
    return module
