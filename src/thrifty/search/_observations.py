"""Training data of a model: points in the unit cube and scores of trials at one fidelity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from thrifty.core import SpaceError
from thrifty.space import Config, Coordinates, Space

from ._history import History, Trial


FloatArray = npt.NDArray[np.float64]

_MAX_REMEMBERED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Trials observed at one epoch.

    Attributes:
        configs: their configurations, ``n`` of them.
        scores: ``[n]``, finite, higher is better; the worst seen for a trial that failed or
            violated a constraint.
        points: ``[n, d]``, in the unit cube; NaN where a configuration lacks the coordinate.
        epoch: fidelity at which they were observed (0: there are none).
        pending: configurations of running trials without a score at that epoch.
    """

    configs: tuple[Config, ...]
    scores: FloatArray
    points: FloatArray
    epoch: int
    pending: tuple[Config, ...]

    def __len__(self) -> int:
        return len(self.configs)


@lru_cache(maxsize=16)
def coordinates_of(space: Space) -> Coordinates:
    """Return the coordinates of a space; cached by its identity, because it never changes."""
    return Coordinates(space)


def observe(history: History, coordinates: Coordinates, *, min_points: int) -> Observations:
    """Return the trials at the largest epoch that at least ``min_points`` of them have reached.

    If fewer trials are known, it is the epoch with the most trials. This is the model of the
    highest fidelity that has enough data (Falkner et al., "BOHB: Robust and Efficient
    Hyperparameter Optimization at Scale", ICML 2018, section 3.2). Trials of earlier studies count
    equally. A failed trial counts as observed at its target. Trials outside this space are left
    out.

    >>> from thrifty.search import Proposal
    >>> from thrifty.space import Float
    >>> history, space = History(), Space(lr=Float(0.0, 1.0))
    >>> for lr in (0.25, 0.5):
    ...     number = history.record_decision(Proposal(target=2, config={"lr": lr}))
    >>> history.record_scores(0, [0.7, 0.8])
    >>> seen = observe(history, Coordinates(space), min_points=1)
    >>> seen.epoch, seen.scores, seen.points, seen.pending
    (2, array([0.8]), array([[0.25]]), ({'lr': 0.5},))
    """
    points = _points(coordinates)
    seen: list[tuple[int, Trial, Sequence[float]]] = []
    running: list[Trial] = []
    for trial in chain(history.prior, history):
        depth = trial.target if trial.state == "failed" else trial.reached
        if not depth and trial.state != "running":
            continue
        point = points.of(trial.config)
        if point is None:
            continue
        if depth:
            seen.append((depth, trial, point))
        if trial.state == "running":
            running.append(trial)
    depths = sorted((depth for depth, _, _ in seen), reverse=True)
    epoch = depths[min(min_points, len(depths)) - 1] if depths else 0
    at_epoch = [(trial, point) for depth, trial, point in seen if depth >= epoch]
    return Observations(
        configs=tuple(trial.config for trial, _ in at_epoch),
        scores=_scores([trial for trial, _ in at_epoch], epoch),
        points=_table([point for _, point in at_epoch], coordinates),
        epoch=epoch,
        pending=tuple(trial.config for trial in running if trial.reached < epoch or not epoch),
    )


def points_of(configs: Sequence[Config], coordinates: Coordinates) -> FloatArray:
    """Return the points in the unit cube, ``[n, d]``, of the configurations within the space.

    >>> from thrifty.space import Float
    >>> points_of([{"lr": 0.25}, {"lr": 7}], Coordinates(Space(lr=Float(0.0, 1.0))))
    array([[0.25]])
    """
    points = _points(coordinates)
    found = [point for config in configs if (point := points.of(config)) is not None]
    return _table(found, coordinates)


def _table(points: Sequence[Sequence[float]], coordinates: Coordinates) -> FloatArray:
    return np.array(points, float).reshape(len(points), len(coordinates))


def _scores(trials: Sequence[Trial], epoch: int) -> FloatArray:
    scores = np.array([_score(trial, epoch) for trial in trials], float)
    finite = np.isfinite(scores)
    if finite.any():
        return np.where(finite, scores, scores[finite].min())
    # No trial satisfies the constraints, so a smaller violation is better (Deb, 2000).
    violations = np.array([math.inf if t.state == "failed" else t.violation for t in trials])
    finite = np.isfinite(violations)
    worst = violations[finite].max() if finite.any() else 0.0
    return -np.where(finite, violations, worst)


def _score(trial: Trial, epoch: int) -> float:
    if trial.state == "failed" or trial.violation > 0:
        return -math.inf
    return trial.scores[epoch - 1]


Derived = TypeVar("Derived")


class ConfigCache(Generic[Derived]):
    """Cache of what is computed from configurations.

    A history returns the same objects every time, so they are looked up by identity, without
    hashing all their values. The cache keeps each object alive, so that no other object can get its
    identity.
    """

    def __init__(self, compute: Callable[[Config], Derived]) -> None:
        self._compute = compute
        self._found: dict[int, tuple[Config, Derived]] = {}

    def of(self, config: Config) -> Derived:
        """Return what ``compute`` returns for a configuration."""
        found = self._found.get(id(config))
        if found is None:
            if len(self._found) >= _MAX_REMEMBERED:
                self._found.clear()
            found = self._found[id(config)] = config, self._compute(config)
        return found[1]


@lru_cache(maxsize=16)
def _points(coordinates: Coordinates) -> ConfigCache[Sequence[float] | None]:
    """Return the cache of coordinates in the unit cube, None for a configuration outside of it."""

    def point(config: Config) -> Sequence[float] | None:
        try:
            return tuple(coordinates.to_unit(config).tolist())
        # The configuration is from an earlier study, or the user enqueued it on purpose.
        except SpaceError:
            return None

    return ConfigCache(point)
