"""The interface of a sampler, what samplers share, and checks of options.

Algorithms use the same checks of options."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from thrifty.core import AlgorithmError, require
from thrifty.search._history import History
from thrifty.space import Config, Schedule, Space, Timeline, common_prefix


FloatArray = npt.NDArray[np.float64]

_NUM_DRAWS = 20


class Picker:
    """Picks candidates one after the other for one answer of a sampler, none of them twice.

    ``share`` is the part of the best candidate's lead over the median that may be given up to share
    training. With 0, the best candidate is picked.

    >>> from thrifty.search import Proposal
    >>> from thrifty.space import Choice, Constant, Step
    >>> history = History()
    >>> trial = history.record_decision(Proposal(target=9, config={"lr": Constant(0.1)}))
    >>> configs = [{"lr": Constant(0.1)}, {"lr": Step(0.1, [5])}, {"lr": Constant(0.2)}]
    >>> acquisition = np.array([1.0, 2.9, 3.0])
    >>> Picker(history, share=0.0).pick(acquisition, configs.__getitem__)
    (2, {'lr': Constant(0.2)})
    >>> Picker(history, share=1.0).pick(acquisition, configs.__getitem__)
    (1, {'lr': Step(0.1, (5,))})
    """

    def __init__(self, history: History, *, share: float) -> None:
        self._before = _Keys.of(history)
        self._taken: set[Hashable] = set()
        self._share = share
        self._trained = _Trained(history) if share else None

    def pick(
        self, acquisition: FloatArray, config_of: Callable[[int], dict[str, Any]]
    ) -> tuple[int, dict[str, Any]] | None:
        """Return index and configuration of the candidate to try; None if all have been tried.

        Args:
            acquisition: ``[n]``, higher is better.
            config_of: Function from an index to the candidate's configuration; called for few of
                them.
        """
        new = self._new(acquisition, config_of)
        best = next(new, None)
        if best is None:
            return None
        if self._trained is not None:
            best = self._most_shared(best, new, acquisition)
        self._taken.add(_key(best[1]))
        return best

    def draw(self, space: Space, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a random configuration, a new one if a few tries find one."""
        for _ in range(_NUM_DRAWS):
            config = space.sample(rng)
            if not self.is_known(config):
                break
        self._taken.add(_key(config))
        return config

    def is_known(self, config: Config) -> bool:
        """Return whether a trial has this configuration, or an earlier pick had it."""
        key = _key(config)
        return key in self._taken or key in self._before

    def take(self, config: Config) -> None:
        """Let no later pick have this configuration."""
        self._taken.add(_key(config))

    def _new(
        self, acquisition: FloatArray, config_of: Callable[[int], dict[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield candidates that have not been tried, best first."""
        for index in np.argsort(-acquisition, kind="stable").tolist():
            config = config_of(index)
            if not self.is_known(config):
                yield index, config

    def _most_shared(
        self,
        best: tuple[int, dict[str, Any]],
        others: Iterator[tuple[int, dict[str, Any]]],
        acquisition: FloatArray,
    ) -> tuple[int, dict[str, Any]]:
        assert self._trained is not None
        lead = acquisition[best[0]] - np.median(acquisition)
        least = acquisition[best[0]] - self._share * max(lead, 0.0)
        most = self._trained.shared(best[1])
        for index, config in others:
            if acquisition[index] < least:
                break
            shared = self._trained.shared(config)
            if shared > most:
                best, most = (index, config), shared
        return best


class _Trained:
    """Trials that have been or will be trained, for comparison with candidates."""

    def __init__(self, history: History) -> None:
        self._trials = [
            (trial.config, trial.target if trial.state == "running" else trial.reached)
            for trial in history
        ]
        # A sampler does not know how long trials may become, so take the longest in the history.
        longest = max((trial.target for trial in history), default=1)
        self._epochs = max([longest, *(_span(config) for config, _ in self._trials)])
        self._by_start: dict[int, dict[Hashable, list[tuple[Timeline, int]]]] = {}

    def shared(self, config: Config) -> int:
        """Return the longest prefix, in epochs, that a configuration shares with trained epochs."""
        epochs = max(self._epochs, _span(config))
        timeline = Timeline(config, epochs=epochs)
        most = 0
        for other, depth in self._at(epochs).get(timeline.runs[0].key, ()):
            if depth <= most:
                break
            most = max(most, min(common_prefix(timeline, other), depth))
        return most

    def _at(self, epochs: int) -> dict[Hashable, list[tuple[Timeline, int]]]:
        """Return timelines grouped by their first value, longest trained first.

        Most timelines differ in the first value already, so only one group needs to be compared.
        """
        if epochs not in self._by_start:
            found: dict[Hashable, list[tuple[Timeline, int]]] = {}
            for config, depth in sorted(self._trials, key=lambda trial: -trial[1]):
                timeline = Timeline(config, epochs=epochs)
                found.setdefault(timeline.runs[0].key, []).append((timeline, depth))
            self._by_start[epochs] = found
        return self._by_start[epochs]


def _span(config: Config) -> int:
    """Return the fewest epochs that its schedules fit into."""
    spans = [value.span() for value in config.values() if isinstance(value, Schedule)]
    return math.ceil(max(spans, default=1))


class _Keys:
    """Keys of all trials of a history, each computed once because a history only grows."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._keys: set[Hashable] = set()

    @classmethod
    def of(cls, history: History) -> set[Hashable]:
        found = _REMEMBERED.setdefault(history, cls())
        for number in range(found._num_seen, len(history)):
            found._keys.add(_key(history[number].config))
        found._num_seen = len(history)
        return found._keys


_REMEMBERED: WeakKeyDictionary[History, _Keys] = WeakKeyDictionary()


def _key(config: Config) -> Hashable:
    """Return the configuration as a hashable key; 1, 1.0 and True are different options."""
    return frozenset((name, type(value), value) for name, value in config.items())


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
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
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

    def size(self, space: Space, *, most: int | None = None) -> int:
        """Return the number of configurations, or ``most`` if there are more.

        >>> from thrifty.space import Float, Space
        >>> GridSampler(levels=4).size(Space(lr=Float(0.1, 0.3)))
        4
        """
        walk = _walk(space, self.levels, self.shuffle_seed)
        return len(walk) if most is None else len(walk.get(0, most))

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
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
class QuantizedSampler(Sampler):
    """Draws each configuration after thinning every interval to ``levels`` values; never exhausted.

    Two draws from an interval never coincide, so they cannot share any training. Draws from a few
    of its values do (Li et al., "Exploiting Reuse in Pipeline-Aware Hyperparameter Tuning", 2019).

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.4)), np.random.default_rng(0)
    >>> QuantizedSampler(levels=4).sample(History(), space, num=1, rng=rng)
    [{'lr': 0.4}]
    """

    levels: int = 4

    def __post_init__(self) -> None:
        check_counts(self, levels=self.levels)

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
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
            raise option_error(
                self,
                "share must be the number of further suggestions to choose from, 0 or more",
                share=self.share,
            )
        self.check()

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
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


def option_error(owner: object, advice: str, /, **options: object) -> AlgorithmError:
    """Return the error about options of an algorithm or a sampler, to be raised.

    >>> option_error(RandomSampler(), "use 2 or more", population=1)
    AlgorithmError('RandomSampler(population=1): use 2 or more')
    """
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return AlgorithmError(f"{type(owner).__name__}({shown}): {advice}")


MOST = 2**31 - 1
"""The largest count that databases keep as a number."""


def check_counts(owner: object, **named: object) -> None:
    """Raise AlgorithmError unless every given option is a whole number from 1 to ``MOST``."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise option_error(owner, f"{name} must be a whole number, 1 or more", **{name: value})
        if value > MOST:
            raise option_error(owner, f"{name} must be at most {MOST:,}", **{name: value})


def check_halving(owner: object, *, eta: object, min_epochs: int, max_epochs: int) -> None:
    """Raise AlgorithmError unless there are rungs from ``min_epochs`` to ``max_epochs``."""
    check_counts(owner, eta=eta, min_epochs=min_epochs, max_epochs=max_epochs)
    if eta == 1:
        raise option_error(owner, "no trial would ever be dropped; use 2 or more", eta=eta)
    if min_epochs > max_epochs:
        raise option_error(
            owner,
            "min_epochs must not exceed max_epochs; lower it or train longer",
            min_epochs=min_epochs,
            max_epochs=max_epochs,
        )


def check_shares(owner: object, **named: object) -> None:
    """Raise AlgorithmError unless every given option is a number from 0 to 1."""
    for name, value in named.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value <= 1):  # type: ignore[operator]
            raise option_error(owner, f"{name} must be a number from 0 to 1", **{name: value})
