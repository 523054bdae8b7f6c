"""Choice among a model's candidates: untried ones, and of good ones those that share training."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from thrifty.search._history import History
from thrifty.space import Config, Schedule, Space, Timeline, common_prefix


FloatArray = npt.NDArray[np.float64]

_NUM_TRIES = 20


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
            config_of: function from an index to the candidate's configuration; called for few of
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
        for _ in range(_NUM_TRIES):
            config = space.sample(rng)
            if not self._is_known(config):
                break
        self._taken.add(_key(config))
        return config

    def _is_known(self, config: Config) -> bool:
        key = _key(config)
        return key in self._taken or key in self._before

    def _new(
        self, acquisition: FloatArray, config_of: Callable[[int], dict[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield candidates that have not been tried, best first."""
        for index in np.argsort(-acquisition, kind="stable").tolist():
            config = config_of(index)
            if not self._is_known(config):
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
