"""Functional ANOVA: how much of a random forest's variance each coordinate explains alone.

The results equal those of Optuna's evaluator for parameters from 0 to 1 (a test checks this), but
all leaves of a tree are processed at once.

References:
    Hutter, Hoos, Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance",
    ICML 2014.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.core import MissingExtraError


FloatArray = npt.NDArray[np.float64]

_NUM_TREES = 64
_MAX_DEPTH = 64


def fanova(points: FloatArray, values: FloatArray, *, seed: int) -> FloatArray:
    """Return the share of variance that each coordinate explains alone, shape ``[d]``.

    The shares sum to less than one if coordinates explain a part only together. ``points`` are in
    the unit cube, shape ``[n, d]``; ``values`` has shape ``[n]``. All shares are zero if the forest
    is constant.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    >>> points = np.random.default_rng(0).uniform(size=(100, 2))
    >>> fanova(points, points[:, 1] ** 2, seed=0).round(1).tolist()
    [0.0, 1.0]
    """
    forest = _ensemble().RandomForestRegressor(
        n_estimators=_NUM_TREES, max_depth=_MAX_DEPTH, random_state=seed
    )
    forest.fit(points, values)
    shares = [_tree_shares(each.tree_, points.shape[1]) for each in forest.estimators_]
    known = [share for share in shares if share is not None]
    return np.mean(known, axis=0) if known else np.zeros(points.shape[1])


def _tree_shares(tree: Any, num_coordinates: int) -> FloatArray | None:
    """Return the shares in one tree, or None if the tree is constant."""
    boxes_LD2 = _leaf_boxes(tree, num_coordinates)
    values_L = tree.value[tree.feature < 0].reshape(-1)
    widths_LD = boxes_LD2[:, :, 1] - boxes_LD2[:, :, 0]
    volumes_L = widths_LD.prod(axis=1)
    mean = volumes_L @ values_L
    variance = volumes_L @ (values_L - mean) ** 2
    if variance <= 0.0:
        return None
    shares = np.zeros(num_coordinates)
    for index in range(num_coordinates):
        edges_S = np.unique(boxes_LD2[:, index, :])
        middles_S = (edges_S[1:] + edges_S[:-1]) / 2
        # The mean over all other coordinates, for each interval in which the tree is constant.
        low_L1, high_L1 = boxes_LD2[:, index, :1], boxes_LD2[:, index, 1:]
        inside_LS = (low_L1 <= middles_S) & (middles_S < high_L1)
        weighted_L = values_L * volumes_L / widths_LD[:, index]
        marginal_S = weighted_L @ inside_LS
        shares[index] = np.diff(edges_S) @ (marginal_S - mean) ** 2 / variance
    return shares


def _leaf_boxes(tree: Any, num_coordinates: int) -> FloatArray:
    """Return lower and upper bounds of each leaf, shape ``[leaves, d, 2]``."""
    boxes = np.empty((tree.node_count, num_coordinates, 2))
    boxes[0] = 0.0, 1.0
    for node in np.flatnonzero(tree.feature >= 0):  # visits parents before their children
        feature, threshold = tree.feature[node], tree.threshold[node]
        left, right = tree.children_left[node], tree.children_right[node]
        boxes[left] = boxes[right] = boxes[node]
        boxes[left, feature, 1] = boxes[right, feature, 0] = threshold
    leaves: FloatArray = boxes[tree.feature < 0]
    return leaves


def _ensemble() -> Any:
    try:
        return import_module("sklearn.ensemble")
    except ImportError:
        raise MissingExtraError("scikit-learn", extra="search") from None
