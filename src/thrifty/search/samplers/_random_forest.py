"""A sampler that learns a random forest, as in SMAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thrifty.core import require
from thrifty.search._history import History
from thrifty.search._scores import Observations, coordinates_of, observe, points_of
from thrifty.space import Space

from ._base_sampler import Picker, Sampler, check_counts, check_shares
from ._kde import cdf, normal_scores, pdf


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int_]

_NOT_THERE = -1.0
"""Value of a missing coordinate: outside the unit cube, so one split separates it from others."""
_SHARE_OF_COORDINATES = 5 / 6
_LEAST_DEVIATION = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Regression trees, each grown on a bootstrap sample (Breiman, 2001), as one table of nodes.

    Attributes:
        trees: Scikit-learn's trees, which find the leaf of a point.
        first: ``[t]``, index of the first node of each tree.
        values: ``[nodes]``, mean score of each node.
        weights: ``[nodes]``, number of scores of each node.
    """

    trees: tuple[Any, ...]
    first: IntArray
    values: FloatArray
    weights: FloatArray

    @classmethod
    def grow(
        cls, points: FloatArray, scores: FloatArray, *, num_trees: int, rng: np.random.Generator
    ) -> Forest:
        """Fit trees to the scores of points, which may have gaps (NaN).

        scikit-learn's trees are grown one by one. Its ``RandomForestRegressor`` grows the same
        trees, but its checks and joblib make it take twice as long for so few points.
        """
        sklearn, kind = (
            import_module("sklearn"),
            import_module("sklearn.tree").DecisionTreeRegressor,
        )
        num = len(points)
        filled, targets = _filled(points), np.ascontiguousarray(scores[:, None])
        samples = rng.multinomial(num, np.full(num, 1.0 / num), size=num_trees)
        seeds = rng.integers(2**31, size=num_trees).tolist()
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
            trees = tuple(
                kind(max_features=_SHARE_OF_COORDINATES, random_state=seed)
                .fit(filled, targets, sample_weight=sample, check_input=False)
                .tree_
                for seed, sample in zip(seeds, samples.astype(float), strict=True)
            )
        sizes = [tree.node_count for tree in trees]
        return cls(
            trees=trees,
            first=np.cumsum([0, *sizes[:-1]]),
            values=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
            weights=np.concatenate([tree.weighted_n_node_samples for tree in trees]),
        )

    def leaves(self, points: FloatArray) -> IntArray:
        """Return the leaf of each point in each tree, ``[t, n]``."""
        filled = _filled(points)
        found: IntArray = np.stack([tree.apply(filled) for tree in self.trees])
        return found + self.first[:, None]

    def believing(self, leaves: IntArray, score: float) -> Forest:
        """Return the forest as if points with these leaves (``[t, n]``) had this score.

        Growing the trees anew for each point of a batch would cost many times the rest. A fake
        score in the mean of a leaf keeps other draws away from all points that the trees consider
        alike, whatever the units of the coordinates.
        """
        weights, sums = self.weights.copy(), self.weights * self.values
        np.add.at(weights, leaves, 1.0)
        np.add.at(sums, leaves, score)
        return replace(self, values=sums / weights, weights=weights)

    def expected_improvement(self, leaves: IntArray, *, best: float) -> FloatArray:
        """Return the expected improvement over the best for points with these leaves, ``[n]``.

        Jones et al., 1998, with mean and standard deviation over trees (Hutter et al., 2011).
        ``leaves`` is ``[t, n]``.
        """
        guesses = self.values[leaves]
        mean = guesses.mean(axis=0)
        deviation = np.maximum(guesses.std(axis=0), _LEAST_DEVIATION)
        z = (mean - best) / deviation
        gain: FloatArray = deviation * (z * cdf(z) + pdf(z))
        return gain


def _filled(points: FloatArray) -> npt.NDArray[np.float32]:
    return np.where(np.isnan(points), _NOT_THERE, points).astype(np.float32)


def check_sklearn() -> None:
    """Raise MissingExtraError if scikit-learn is not installed.

    Samplers call it on the first draw, so that the error does not come in the middle of a study.
    """
    require("sklearn.tree", package="scikit-learn", extra="search")


_NUM_BEST = 10
_STEP = 0.2
_NUM_PATTERNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomForestSampler(Sampler):
    """Proposes the largest expected improvement under a random forest; never exhausted.

    Hutter, Hoos and Leyton-Brown, "Sequential Model-Based Optimization for General Algorithm
    Configuration", LION 2011. It learns from the trials at the largest epoch that enough of them
    have reached. Half of ``num_candidates`` are random, half are neighbours of the best trials,
    which differ in one hyper-parameter. Only the order of scores counts, so diverged trials do no
    harm. Trials in training and recent draws count as the worst seen, so that a batch spreads. A
    share ``random_share`` of the draws is random, and all draws are until there is enough to learn
    from. It needs scikit-learn, from the extra ``search``.

    Args:
        num_trees: Number of trees.
        num_candidates: Number of candidates for each answer.
        random_share: Share of the draws that are random.
        min_points: Number of trials that it needs (default: one more than there are coordinates).
        share: Part of the best candidate's lead over the median that may be given up to share
            training.

    Raises:
        AlgorithmError: An option is out of range.
        MissingExtraError: scikit-learn is not installed (on the first draw).

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> RandomForestSampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]
    """

    adapts: ClassVar[bool] = True
    num_trees: int = 50
    num_candidates: int = 1000
    random_share: float = 1 / 3
    min_points: int | None = None
    share: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, num_trees=self.num_trees, num_candidates=self.num_candidates)
        check_shares(self, random_share=self.random_share, share=self.share)
        if self.min_points is not None:
            check_counts(self, min_points=self.min_points)

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        check_sklearn()
        coordinates = coordinates_of(space)
        least = self.min_points or len(coordinates) + 1
        picker = Picker(history, share=self.share)
        is_random = rng.random(num) < self.random_share
        if is_random.all():
            return [picker.draw(space, rng) for _ in range(num)]
        seen = observe(history, coordinates, min_points=least)
        if len(seen) < least or not len(coordinates):
            return [picker.draw(space, rng) for _ in range(num)]
        scores = normal_scores(seen.scores)
        forest = Forest.grow(seen.points, scores, num_trees=self.num_trees, rng=rng)
        best, lie = float(scores.max()), float(scores.min())
        forest = forest.believing(forest.leaves(points_of(seen.pending, coordinates)), lie)
        points = self._candidates(seen, space, rng)
        leaves = forest.leaves(points)
        # Filled values are not read, unless a drawn number makes a condition true.
        filled = np.where(np.isnan(points), rng.random(points.shape), points)
        configs = []
        for at_random in is_random.tolist():
            picked = None
            if not at_random:
                gain = forest.expected_improvement(leaves, best=best)
                picked = picker.pick(gain, lambda i: coordinates.from_unit(filled[i]))
            config = picker.draw(space, rng) if picked is None else picked[1]
            forest = forest.believing(forest.leaves(points_of([config], coordinates)), lie)
            configs.append(config)
        return configs

    def _candidates(self, seen: Observations, space: Space, rng: np.random.Generator) -> FloatArray:
        best = seen.points[np.argsort(-seen.scores, kind="stable")[:_NUM_BEST]]
        num_neighbours = self.num_candidates // 2
        return np.concatenate([
            _random_points(space, self.num_candidates - num_neighbours, rng=rng),
            _neighbours(space, best, num_neighbours, rng=rng),
        ])


def _random_points(space: Space, num: int, *, rng: np.random.Generator) -> FloatArray:
    """Return points of random configurations, ``[num, d]``, drawn many at once."""
    num_options = coordinates_of(space).num_options
    last = np.maximum(num_options - 1, 1)
    points = rng.random((num, len(num_options)))
    options = np.minimum(np.floor(points * num_options), last) / last
    points = np.where(num_options > 0, options, points)
    patterns = _patterns(space)
    if len(patterns):
        # Options determine which coordinates are present, so take both from the same pattern.
        pattern = patterns[rng.integers(len(patterns), size=num)]
        points = np.where((num_options > 0) | np.isnan(pattern), pattern, points)
    return points


def _neighbours(
    space: Space, best: FloatArray, num: int, *, rng: np.random.Generator
) -> FloatArray:
    """Return points that differ from one of the best in one coordinate, ``[num, d]``."""
    coordinates = coordinates_of(space)
    num_options = coordinates.num_options
    points = best[rng.integers(len(best), size=num)]
    there = ~np.isnan(points)
    column = np.where(there, rng.random(points.shape), -1.0).argmax(axis=1)
    rows, options = np.arange(num), num_options[column]
    old, last = points[rows, column], np.maximum(options - 1, 1)
    other = (np.rint(old * last) + rng.integers(1, last + 1)) % np.maximum(options, 1) / last
    # Reflect steps at the ends of the interval.
    step = 1.0 - np.abs(1.0 - np.abs(old + _STEP * rng.standard_normal(num)))
    points[rows, column] = np.where(options > 0, other, np.clip(step, 0.0, 1.0))
    if len(_patterns(space)):
        for row in np.flatnonzero(options > 0).tolist():
            # Another option may add or remove coordinates.
            filled = np.where(there[row], points[row], rng.random(len(num_options)))
            points[row] = coordinates.to_unit(coordinates.from_unit(filled))
    return points


@lru_cache(maxsize=16)
def _patterns(space: Space) -> FloatArray:
    """Return points of some random configurations, ``[n, d]``; none if no coordinate is optional.

    Configurations are slow to build. So those of a space are built once, and only their numbers are
    drawn anew.
    """
    coordinates, rng = coordinates_of(space), np.random.default_rng(0)

    def draw(num: int) -> FloatArray:
        return np.array([coordinates.to_unit(space.sample(rng)) for _ in range(num)])

    if not np.isnan(first := draw(64)).any():
        return first[:0]
    return np.concatenate([first, draw(_NUM_PATTERNS - len(first))])
