"""What the model of learning curves sees: trials as rows, and which epochs are trained already."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.space import Config, Schedule, Space, Timeline
from thrifty.space._pieces import Hold

from ._curve_model import CannotFit, CurveModel, FloatArray, IntArray, Rows
from ._history import History, Trial
from ._scores import ConfigCache, coordinates_of, points_of


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
    with equal first epochs meet in the same stages. Only trials whose hyper-parameters begin with
    equal values can meet, so a trial gets stages when another one or a candidate begins like it:
    most of 100,000 random trials never do. ``StageForest.of`` reads the records since its last
    call; the result depends on the history alone.

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
        self._epochs = epochs
        self._timelines = ConfigCache(lambda config: Timeline(config, epochs=epochs))
        self._alone: dict[int, Trial] = {}
        """Trials without stages, by their first values, which no other trial has."""
        self._met: set[int] = set()
        """The first values of trials that have stages."""
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
        first = _first_values(config, self._epochs)
        if first in self._alone:
            self._meet(first)
        if first not in self._met:
            return Prefix(0, 0, -1)
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
        first = _first_values(trial.config, self._epochs)
        if first in self._met:
            self._add_stages(trial)
            return
        known = self._alone.get(first)
        if known is None or known.number == trial.number:
            self._alone[first] = trial
            self.num_epochs += self._length(trial) - (self._length(known) if known else 0)
            return
        self._meet(first)
        self._add_stages(trial)

    def _meet(self, first: int) -> None:
        """Give stages to the trial that was alone with its first values."""
        self._met.add(first)
        trial = self._alone.pop(first)
        self.num_epochs -= self._length(trial)
        self._add_stages(trial)

    def _length(self, trial: Trial) -> int:
        return min(trial.target, self._epochs)

    def _add_stages(self, trial: Trial) -> None:
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


def _first_values(config: Config, epochs: int) -> int:
    """Return a number that is the same for two configurations if their first epochs are equal.

    The reverse is not true: it tells apart what is cheap to tell apart.
    """
    # Hashes are enough, and 100,000 sets would be half a second of work for the garbage collector.
    return hash(frozenset([(name, _first_value(value, epochs)) for name, value in config.items()]))


def _first_value(value: Any, epochs: int) -> Any:
    if type(value) in _TOLD_APART:
        return value if value == value else None  # not NaN
    if not isinstance(value, Schedule):
        return None
    piece = value.segments(epochs)[0].piece
    return _first_value(piece.value, epochs) if isinstance(piece, Hold) else piece


_TOLD_APART = frozenset({bool, float, int, str})
"""Types whose values are equal where the pieces that hold them are equal."""


NUM_ACTIVE = 96
"""Trials that the model sees."""
NUM_ROWS = 240
"""Scores that the model sees, about."""
NUM_PRIOR = 32
"""Trials of earlier studies among them."""
FLOOR = 3.0
"""Scaled score of a trial that diverged: this many times as far from the best as the median."""


class Candidate(NamedTuple):
    """A waiting trial (``trial``), or a new configuration, and what is known about its curve.

    ``known`` are the scores that it has reported or that equal trials have. Its first ``requested``
    epochs are trained or will be.
    """

    config: Config
    trial: int | None
    known: tuple[float, ...]
    requested: int


def active_trials(history: History, rungs: Sequence[int], *, num: int) -> list[Trial]:
    """Return at most ``num`` trials: the best of each rung, and an even spread of the others.

    Deep rungs come first. Trials in training are among them, the newest first, up to a quarter.
    """
    if len(history) <= num:
        return list(history)
    found: dict[int, Trial] = {}
    for place, rung in enumerate(reversed(rungs)):
        board = history.leaderboard(rung)
        quota = (num - num // 4 - len(found)) // (len(rungs) - place)
        best = quota - quota // 3
        spread = np.linspace(best, max(len(board) - 1, best), quota - best).astype(int).tolist()
        for index in [*range(best), *spread]:
            if index < len(board):
                number = board[index][1]
                found.setdefault(number, history[number])
    for number in reversed(history.moves[-4 * num :]):
        if len(found) >= num:
            break
        found.setdefault(number, history[number])
    return sorted(found.values(), key=lambda trial: trial.number)


class _Features(NamedTuple):
    """What the model knows about a configuration: ``decays`` and ``paths`` at each rung."""

    point: FloatArray
    decays: dict[str, FloatArray]
    paths: IntArray
    moves: bool


class CurveView:
    """Turns trials and candidates into rows of the model.

    ``model`` comes first: it decides which schedules the rows are about, and the ``scale``.
    """

    scale: Scale

    def __init__(self, space: Space, forest: StageForest, rungs: tuple[int, ...]) -> None:
        self._coordinates = coordinates_of(space)
        self._rungs = rungs
        self._features = _features(space, forest, rungs)
        self._names: list[str] = []
        self._moves = False

    def model(
        self, active: Sequence[Trial], history: History, candidates: Sequence[Candidate]
    ) -> CurveModel:
        """Return the model of the curves of all active trials.

        Raises:
            CannotFit: No trial has a finite score, or all scores are equal.
        """
        seen = [*_deepest(history.prior, NUM_PRIOR), *active]
        features = [self._features.of(trial.config) for trial in seen]
        both = [*features, *(self._features.of(c.config) for c in candidates)]
        self._names = sorted({name for each in both for name in each.decays})
        self._moves = any(each.moves for each in both)
        most = max(NUM_ROWS // max(len(seen), 1), 1)
        rows: dict[int, tuple[_Features, int, float]] = {}
        for trial, each in zip(seen, features, strict=True):
            for rung, score in self._observed(trial, most):
                rows.setdefault(int(each.paths[rung]), (each, rung, score))
        for candidate in candidates:
            if candidate.known:  # also where an equal trial that is not active has trained it
                each, num = self._features.of(candidate.config), len(candidate.known)
                rung = int(np.searchsorted(self._rungs, num, side="right")) - 1
                if rung >= 0:
                    score = candidate.known[self._rungs[rung] - 1]
                    rows.setdefault(int(each.paths[rung]), (each, rung, score))
        if not rows:
            raise CannotFit
        scores = np.array([score for _, _, score in rows.values()])
        last = [t.scores[-1] for t in seen if t.reached and math.isfinite(t.scores[-1])]
        self.scale = Scale.of(scores, np.array(last))
        places = self._rows(
            [each for each, _, _ in rows.values()], [r for _, r, _ in rows.values()]
        )
        return CurveModel(places, self.scale.apply(scores), is_choice=self._coordinates.is_choice)

    def places(self, candidates: Sequence[Candidate], epochs: Sequence[int]) -> Rows:
        """Return rows of candidates at epochs, each of which is a rung."""
        features = [self._features.of(candidate.config) for candidate in candidates]
        return self._rows(features, np.searchsorted(self._rungs, epochs).tolist())

    def _rows(self, features: Sequence[_Features], rungs: Sequence[int]) -> Rows:
        times = [self._rungs[r] / self._rungs[-1] for r in rungs]
        decays = [
            [each.decays[name][r] if name in each.decays else 0.0 for name in self._names]
            for each, r in zip(features, rungs, strict=True)
        ]
        paths = [each.paths if self._moves else each.paths[:1] for each in features]
        return Rows(
            points=np.array([each.point for each in features]).reshape(len(features), -1),
            times=np.array(times),
            decays=np.array(decays, float).reshape(len(features), len(self._names)),
            paths=np.array(paths),
        )

    def _observed(self, trial: Trial, most: int) -> Iterator[tuple[int, float]]:
        """Yield ``(index of a rung, score)`` for at most ``most`` rungs, the last first."""
        rungs = self._rungs
        if trial.state == "failed":
            yield int(np.searchsorted(rungs, min(trial.target, rungs[-1]))), -math.inf
            return
        last = int(np.searchsorted(rungs, trial.reached, side="right")) - 1
        steps = [0, 1, 3, 6, 10, 15][:most]
        for step in steps:
            if last - step < 0:
                return
            yield last - step, trial.scores[rungs[last - step] - 1]


class Scale(NamedTuple):
    """Turns scores into units of the distance from the best to the median; 0 is the best.

    Scores far below are compressed towards ``-FLOOR``, so that a few trials that diverge do not
    matter. Scores that are not finite count as the worst.
    """

    best: float
    unit: float
    worst: float

    @classmethod
    def of(cls, scores: FloatArray, last: FloatArray) -> Scale:
        """Return the scale of scores; the best and the median are those of the trials' ``last``.

        Raises:
            CannotFit: No score is finite, or all are equal.

        >>> scale = Scale.of(np.array([0.1, 0.4, 0.8, -np.inf]), np.array([0.4, 0.8]))
        >>> scale.apply(np.array([1.0, 0.8, 0.6, -np.inf])).round(2).tolist()
        [1.0, -0.0, -0.75, -1.62]
        """
        finite = scores[np.isfinite(scores)]
        if not len(finite) or not len(last):
            raise CannotFit
        best, worst = float(last.max()), float(finite.min())
        smallest = 1e-12 * max(abs(best), 1e-300)
        for unit in (best - float(np.median(last)), best - worst):
            if unit > smallest:
                return cls(best, unit, worst)
        raise CannotFit

    def apply(self, scores: FloatArray) -> FloatArray:
        """Return scaled scores, rounded so that adding a number to all scores changes none."""
        behind = (self.best - np.where(np.isfinite(scores), scores, self.worst)) / self.unit
        compressed = -1.0 / (1.0 / np.maximum(behind, 1e-300) + 1.0 / FLOOR)
        out: FloatArray = np.where(behind > 0, compressed, -behind).round(9)
        return out


def _deepest(trials: Sequence[Trial], num: int) -> list[Trial]:
    return sorted(trials, key=lambda trial: -trial.reached)[:num]


@lru_cache(maxsize=16)
def _features(space: Space, forest: StageForest, rungs: tuple[int, ...]) -> ConfigCache[_Features]:
    """Return the cache of what the model knows about configurations of a space."""
    coordinates = coordinates_of(space)
    ids: dict[Hashable, int] = {}  # not hashes: those of -1 and -2 are equal

    def features(config: Config) -> _Features:
        point = points_of([config], coordinates)
        runs = forest.timeline(config).runs
        prefixes = [
            tuple((min(run.stop, rung), run.key) for run in runs if run.start < rung)
            for rung in rungs
        ]
        paths = [ids.setdefault(prefix, len(ids)) for prefix in prefixes]
        schedules = {n: v for n, v in config.items() if isinstance(v, Schedule)}
        return _Features(
            point=point[0] if len(point) else np.full(len(coordinates), np.nan),
            decays={
                name: _decay([
                    forest.timeline(config).values(name, rung - 1, num_steps=1) for rung in rungs
                ])
                for name in schedules
            },
            paths=np.array(paths, dtype=np.int64),
            moves=len(runs) > 1,
        )

    return ConfigCache(features)


def _decay(values: Sequence[Any]) -> FloatArray:
    """Return how far a schedule has decayed from its largest value, from 0 to 1, at each rung.

    It is the mean of a linear and a logarithmic scale: a drop to a hundredth counts fully on both.
    """
    if not all(isinstance(v, int | float) for v in values):
        return np.zeros(len(values))
    sizes = np.abs(np.array(values, float))
    if not sizes.max() > 0:
        return np.zeros(len(values))
    left = sizes / sizes.max()
    out: FloatArray = 0.5 * (1.0 - left) - 0.25 * np.log10(np.maximum(left, 1e-2))
    return out
