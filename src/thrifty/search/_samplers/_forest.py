"""Random forest that takes fake scores without being grown anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.core import MissingExtraError

from ._normal import cdf, pdf


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
        trees: scikit-learn's trees, which find the leaf of a point.
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
    try:
        import_module("sklearn.tree")
    except ImportError:
        raise MissingExtraError("scikit-learn", extra="search") from None
