"""Which epochs of a configuration are trained already: the timelines of a history as a forest."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from thrifty.space import Config, Timeline

from ._history import History, Trial
from ._observations import ConfigCache


class Prefix(NamedTuple):
    """What the trials of a history know about the first epochs of a configuration.

    ``requested`` epochs are trained or will be, so they cost nothing more. The scores of the first
    ``reported`` epochs are those of ``trial`` (-1: none is known).
    """

    requested: int
    reported: int
    trial: int


@dataclass(slots=True)
class _Stage:
    """Epochs from ``start`` on that have one key, after equal epochs before."""

    requested: int
    reported: int = 0
    trial: int = -1


class StageForest:
    """The epochs that the trials of a history train, each of them once.

    A stage is named by the stage before it, its first epoch and the key of its run, so timelines
    with equal first epochs meet in the same stages. ``StageForest.of`` reads the records since its
    last call; the result depends on the history alone.

    >>> from thrifty.search import Proposal
    >>> from thrifty.space import Constant, Step
    >>> history = History()
    >>> trial = history.record_decision(Proposal(target=9, config={"lr": Constant(0.1)}))
    >>> forest = StageForest.of(history, epochs=9)
    >>> forest.num_epochs, forest.prefix({"lr": Step(0.1, [5])})
    (9, Prefix(requested=5, reported=0, trial=-1))
    """

    def __init__(self, *, epochs: int) -> None:
        self.num_epochs = 0
        """Number of different epochs that trials were asked for so far."""
        self._timelines = ConfigCache(lambda config: Timeline(config, epochs=epochs))
        self._stages: dict[Hashable, _Stage] = {}
        self._names: dict[Hashable, int] = {}
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, *, epochs: int) -> StageForest:
        """Return the up-to-date forest of a history whose trials have at most ``epochs`` epochs."""
        known = _KNOWN.setdefault(history, {})
        if epochs not in known:
            known[epochs] = cls(epochs=epochs)
        found = known[epochs]
        for number in dict.fromkeys(history.moves[found._num_moves :]):
            found._add(history[number])
        found._num_moves = len(history.moves)
        return found

    def timeline(self, config: Config) -> Timeline:
        """Return the timeline of a configuration."""
        return self._timelines.of(config)

    def prefix(self, config: Config) -> Prefix:
        """Return how many first epochs of a configuration are requested and reported."""
        requested = reported = 0
        trial, parent = -1, -1
        for run in self.timeline(config).runs:
            name = self._names.get((parent, run.start, run.key))
            if name is None:
                break
            stage = self._stages[name]
            requested = max(requested, min(run.stop, stage.requested))
            if stage.reported > run.start:
                reported, trial = min(run.stop, stage.reported), stage.trial
            if stage.requested < run.stop:
                break
            parent = name
        return Prefix(requested, reported, trial)

    def _add(self, trial: Trial) -> None:
        parent = -1
        for run in self.timeline(trial.config).runs:
            if run.start >= trial.target:
                break
            name = self._names.setdefault((parent, run.start, run.key), len(self._names))
            stage = self._stages.setdefault(name, _Stage(run.start))
            requested = min(run.stop, trial.target)
            self.num_epochs += max(requested - stage.requested, 0)
            stage.requested = max(stage.requested, requested)
            reported = min(run.stop, trial.reached)
            if reported > stage.reported:
                stage.reported, stage.trial = reported, trial.number
            parent = name


_KNOWN: WeakKeyDictionary[History, dict[int, StageForest]] = WeakKeyDictionary()
