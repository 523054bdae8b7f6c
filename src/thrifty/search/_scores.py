"""Scores of trials: as training data of a model, and how surely one trial is better than another.

Training data are points in the unit cube and the scores of trials at one fidelity.

Decisions between trials whose scores are means over several seeds are cautious. Each mean has a
standard error. With a few seeds it is itself uncertain, so half of each variance comes from the
trial and half from the average over the trials that are compared. A few trials are often about to
diverge, with values that are larger by orders of magnitude. They must not decide about the others,
so averages leave out what is far from the median. Trials are treated as independent. They are
trained with the same seeds, which cancels some noise in their differences, so the probabilities are
cautious.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from thrifty.core import SpaceError, derive_seed
from thrifty.space import Config, Coordinates, Space

from ._history import History, Trial


FloatArray = npt.NDArray[np.float64]

_MAX_REMEMBERED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Trials observed at one epoch.

    Attributes:
        configs: Their configurations, ``n`` of them.
        scores: ``[n]``, finite, higher is better; the worst seen for a trial that failed or
            violated a constraint.
        points: ``[n, d]``, in the unit cube; NaN where a configuration lacks the coordinate.
        epoch: Fidelity at which they were observed (0: there are none).
        pending: Configurations of running trials without a score at that epoch.
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


# -- decisions between means over seeds ---------------------------------------------------

SURE = 0.9
"""The probability of being worse at which a rung stops a trial."""
FAR = 10.0
"""A variance above this many medians does not count in the average."""
MAX_WIDENING = 2
"""A rung keeps at most this many times the trials that it keeps with one seed."""
CAUTION = 1.5
"""Variances are multiplied by this for the probability of being the best.

Without it, the probability is too high where many trials are about as good as the best one, as
simulations with known true means show.
"""
NUM_DRAWS = 4_000
MAX_COMPARED = 256
"""The best trials by mean, among which the probability of being the best is computed."""


def shared_variances(standard_errors: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the variance of each mean, half its own and half the average over most trials.

    The average is that of the variances up to ``FAR`` times their median.

    The variance of a mean whose standard error is not finite is infinite.

    >>> shared_variances([1.0, 3.0]).tolist()
    [3.0, 7.0]
    >>> shared_variances([1.0, 1.0, 1e9]).tolist()[:2]
    [1.0, 1.0]
    """
    own = np.square(np.asarray(standard_errors, dtype=float))
    finite = own[np.isfinite(own)]
    pooled = finite[finite <= FAR * np.median(finite)].mean() if len(finite) else math.inf
    shared: np.ndarray = (own + pooled) / 2
    return shared


def probability_worse(mean: float, variance: float, *, than: float, than_variance: float) -> float:
    """Return the probability that a trial's true mean is below another's.

    >>> probability_worse(0.0, 0.5, than=0.0, than_variance=0.5)
    0.5
    >>> round(probability_worse(0.0, 0.5, than=1.28, than_variance=0.5), 2)
    0.9
    """
    gap, spread = than - mean, math.sqrt(variance + than_variance)
    if not spread:
        return float(gap > 0) if gap else 0.5
    if not (math.isfinite(gap) and math.isfinite(spread)):
        return 1.0 if gap == math.inf else 0.5
    return 0.5 * (1 + math.erf(gap / spread / math.sqrt(2)))


def not_surely_worse(
    scores: Sequence[float], standard_errors: Sequence[float], *, cut: int
) -> list[int]:
    """Return the places of the trials behind the first ``cut`` that a rung cannot stop yet.

    These are worse than the last of the first ``cut`` with a probability below ``SURE``. At most
    ``MAX_WIDENING - 1`` times ``cut`` trials are returned. An exact tie is none of them: trials
    that tie have shared all their training so far, and another seed would not part them.

    Args:
        scores: Means over the seeds, the best first; failed trials are left out.
        standard_errors: Standard errors of these means.
        cut: The number of trials that go on in any case.

    >>> not_surely_worse([1.0, 0.9, 0.1], [0.1, 0.1, 0.1], cut=1)
    [1]
    """
    variances = shared_variances(standard_errors)
    than, than_variance = scores[cut - 1], float(variances[cut - 1])
    found = [
        place
        for place in range(cut, len(scores))
        if scores[place] < than
        and probability_worse(
            scores[place], float(variances[place]), than=than, than_variance=than_variance
        )
        < SURE
    ]
    return found[: (MAX_WIDENING - 1) * cut]


def probability_best(
    means: Sequence[float], standard_errors: Sequence[float], *, rng: np.random.Generator
) -> np.ndarray:
    """Return the probability of each trial to have the highest true mean.

    Means are shrunk towards their median by the share of their variance that is noise, because the
    best of many means is too good by chance. Trials beyond the best ``MAX_COMPARED`` get 0, and so
    do those that are so far behind the median that they must be diverging.

    >>> rng = np.random.default_rng(0)
    >>> probability_best([0.0, 10.0, 1.0], [0.1, 0.1, 0.1], rng=rng).tolist()
    [0.0, 1.0, 0.0]
    """
    given, errors = np.asarray(means, dtype=float), np.asarray(standard_errors, dtype=float)
    out = np.zeros(len(given))
    usable = np.flatnonzero(np.isfinite(given) & np.isfinite(errors))
    if not len(usable):
        return out
    usable = usable[np.argsort(-given[usable], kind="stable")][:MAX_COMPARED]
    values, variances = given[usable], shared_variances(errors[usable])
    centre, spread = _centre_and_spread(values)
    near = values >= centre - FAR * math.sqrt(spread + float(np.median(variances)))
    usable, values = usable[near], values[near]
    variances = CAUTION * shared_variances(errors[usable])
    if len(usable) == 1:
        out[usable] = 1.0
        return out
    centre, spread = _centre_and_spread(values)
    between = max(float(spread - np.median(variances)), 0.0)
    total = between + variances
    # Without any variance all trials are equal; then nothing is shrunk.
    kept = np.divide(between, total, out=np.ones_like(total), where=total > 0)
    draws = (
        centre
        + kept * (values - centre)
        + np.sqrt(kept * variances) * rng.standard_normal((NUM_DRAWS, len(usable)))
    )
    # Where draws tie, each of the tied trials may be the best.
    is_best = draws == draws.max(axis=1, keepdims=True)
    out[usable] = (is_best / is_best.sum(axis=1, keepdims=True)).mean(axis=0)
    return out


def certainty(
    place: int, means: Sequence[float], standard_errors: Sequence[float], *, seed: int
) -> float:
    """Return the probability that the trial at ``place`` has the highest true mean of all.

    Args:
        place: The place of the trial among the others.
        means: The score of each trial, higher is better.
        standard_errors: The standard errors of these means.
        seed: The seed of the study; the same study always gets the same probability.
    """
    rng = np.random.default_rng(derive_seed(seed, "certainty"))
    return float(probability_best(means, standard_errors, rng=rng)[place])


def _centre_and_spread(values: np.ndarray) -> tuple[float, float]:
    """Return the median of values, and the variance of the better half, robustly.

    The better half decides which trial is the best, and it is often the narrower one.
    """
    centre = float(np.median(values))
    # The median absolute deviation of normal values is 1 / 1.4826 of their standard deviation.
    return centre, float(1.4826 * np.median(values[values >= centre] - centre)) ** 2
