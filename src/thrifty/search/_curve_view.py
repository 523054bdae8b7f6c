"""What the model of learning curves sees: trials as rows, and which epochs are trained already."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.space import Config, Schedule, Space, Timeline
from thrifty.space._pieces import Hold

from ._curve_model import CannotFit, CurveModel, FloatArray, IntArray, Rows
from ._history import History, Trial
from ._observations import ConfigCache, coordinates_of, points_of


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
        self._lengths: list[int] = []
        """How many epochs each trial was asked for."""
        self._num_trial_epochs = 0
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

    @property
    def share(self) -> float:
        """Share of the trials' epochs that another trial trains for them, from 0 to 1."""
        return 1.0 - self.num_epochs / self._num_trial_epochs if self._num_trial_epochs else 0.0

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
        self._lengths += [0] * (trial.number + 1 - len(self._lengths))
        self._num_trial_epochs += self._length(trial) - self._lengths[trial.number]
        self._lengths[trial.number] = self._length(trial)
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
    """What the model knows about a configuration.

    ``decays``, ``courses`` and ``paths`` have a row for each rung; the first two are those of
    scheduled hyper-parameters.
    """

    config: Config
    point: FloatArray
    decays: dict[str, FloatArray]
    courses: dict[str, FloatArray]
    paths: IntArray
    moves: bool

    def course(self, name: str, num_rungs: int) -> FloatArray:
        """Return what has been seen of a hyper-parameter at each rung; NaN if it is absent."""
        if name in self.courses:
            return self.courses[name]
        value = self.config.get(name)
        number = _decades(np.array([value]))[0] if isinstance(value, int | float) else math.nan
        return np.full((num_rungs, 2), number)


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
        self._courses: dict[str, tuple[float, float]] = {}
        self._is_plain = np.ones(len(self._coordinates), dtype=bool)

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
        self._see_courses(both)
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
        is_choice = np.zeros(places.points.shape[1], dtype=bool)
        is_choice[: self._is_plain.sum()] = self._coordinates.is_choice[self._is_plain]
        return CurveModel(places, self.scale.apply(scores), is_choice=is_choice)

    def places(self, candidates: Sequence[Candidate], epochs: Sequence[int]) -> Rows:
        """Return rows of candidates at epochs, each of which is a rung."""
        features = [self._features.of(candidate.config) for candidate in candidates]
        return self._rows(features, np.searchsorted(self._rungs, epochs).tolist())

    def _see_courses(self, features: Sequence[_Features]) -> None:
        """Decide which hyper-parameters are seen as courses, and the scale of each.

        What a schedule has done so far says more than its kind and parameters: two of different
        kinds may do nearly the same.
        """
        self._courses = {}
        for name in sorted({name for each in features for name in each.courses}):
            values = np.concatenate([each.course(name, len(self._rungs)) for each in features])
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
            self._courses[name] = low, min(max(high - low, 1e-9), 1.0)
        self._is_plain = np.array(
            [not _belongs(each.name, self._courses) for each in self._coordinates.coordinates],
            dtype=bool,
        )

    def _points(self, features: Sequence[_Features], rungs: Sequence[int]) -> FloatArray:
        """Return plain coordinates, then the courses of schedules up to the rungs, ``[n, d]``."""
        num = len(features)
        plain = np.array([each.point for each in features]).reshape(num, len(self._coordinates))
        columns = [plain[:, self._is_plain]]
        for name, (low, size) in self._courses.items():
            seen = [
                each.course(name, len(self._rungs))[rung]
                for each, rung in zip(features, rungs, strict=True)
            ]
            columns.append((np.array(seen).reshape(num, 2) - low) / size)
        return np.concatenate(columns, axis=1)

    def _rows(self, features: Sequence[_Features], rungs: Sequence[int]) -> Rows:
        times = [self._rungs[r] / self._rungs[-1] for r in rungs]
        decays = [
            [each.decays[name][r] if name in each.decays else 0.0 for name in self._names]
            for each, r in zip(features, rungs, strict=True)
        ]
        paths = [each.paths if self._moves else each.paths[:1] for each in features]
        return Rows(
            points=self._points(features, rungs),
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

    def features(config: Config) -> _Features:
        point = points_of([config], coordinates)
        runs = forest.timeline(config).runs
        paths = [
            hash(tuple((min(run.stop, rung), run.key) for run in runs if run.start < rung))
            for rung in rungs
        ]
        schedules = {n: v for n, v in config.items() if isinstance(v, Schedule)}
        courses = {name: _course(forest.timeline(config), name, rungs) for name in schedules}
        return _Features(
            config=config,
            courses={name: course for name, course in courses.items() if course is not None},
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


NUM_SAMPLED = 16
"""Epochs before each rung at which a schedule is looked at."""


def _course(timeline: Timeline, name: str, rungs: Sequence[int]) -> FloatArray | None:
    """Return the largest and the mean value of a schedule up to each rung, in decades.

    None if its values are not numbers.
    """
    spread = [np.linspace(0, rung - 1, min(NUM_SAMPLED, rung)).astype(int) for rung in rungs]
    epochs = np.unique(np.concatenate(spread))
    values = [timeline.values(name, epoch, num_steps=1) for epoch in epochs.tolist()]
    if not all(isinstance(value, int | float) for value in values):
        return None
    sizes = np.abs(np.array(values, float))
    lasts = np.diff(np.append(epochs, rungs[-1]))
    places = np.searchsorted(epochs, rungs) - 1
    largest = np.maximum.accumulate(sizes)[places]
    mean = (np.cumsum(sizes * lasts) / np.cumsum(lasts))[places]
    return _decades(np.stack([largest, mean], axis=1))


def _decades(values: FloatArray) -> FloatArray:
    out: FloatArray = np.log10(np.maximum(np.abs(values), 1e-12))
    return out


def _belongs(coordinate: str, names: Iterable[str]) -> bool:
    """Return whether a coordinate is one of these hyper-parameters or lies within one."""
    return any(coordinate == n or coordinate.startswith((f"{n}.", f"{n}[")) for n in names)


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
