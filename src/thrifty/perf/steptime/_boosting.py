"""Models that learn trees: boosting, bagged, and on top of physics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thrifty.core import UsageError, require

from ._model import Columns, PerfectScaling, Setup, StepTimeModel, checked
from ._overlapping import Overlapping


_LEAST = 3
"""Least number of placements in a subset, if there are enough."""


class Bagged:
    """Geometric mean of several fits, each to a subset of the placements of several devices.

    A single fit's forecasts beyond the largest measured scale may depend on a few placements. What
    most subsets agree on does not (bagging, Breiman 1996, by groups).

    Args:
        make: function that makes a model.
        num: number of fits.
        share: share of the placements that each fit sees.
        seed: seed of the subsets.

    Raises:
        UsageError: a number is out of range.

    >>> from thrifty.perf.steptime import Overlapping
    >>> model = Bagged(Overlapping)
    >>> setups = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 4, 8)]
    >>> model.fit(setups, [1.0, 1.5, 1.75, 1.875])
    >>> model.predict([Setup(placement=(1,) * 16, batch=8)]).round(1).tolist()
    [2.1]
    """

    def __init__(
        self,
        make: Callable[[], StepTimeModel],
        *,
        num: int = 8,
        share: float = 0.6,
        seed: int = 0,
    ) -> None:
        if num < 1 or not 0 < share <= 1:
            raise UsageError(
                f"there is at least one fit, to a share of 0 to 1, not num={num}, share={share}"
            )
        self._make = make
        self._num = num
        self._share = share
        self._seed = seed
        self._models: list[StepTimeModel] = []

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit all models."""
        times = np.asarray(step_s, float)
        placements = [
            tuple(sorted(setup.placement)) for setup in setups
        ]  # (4, 2) equals (2, 4)
        several = sorted({placement for placement in placements if sum(placement) > 1})
        rng = np.random.default_rng(self._seed)
        self._models = []
        for _ in range(self._num):
            num = min(len(several), max(_LEAST, round(self._share * len(several))))
            seen = {several[at] for at in rng.permutation(len(several))[:num]}
            kept = [
                at
                for at, placement in enumerate(placements)
                if sum(placement) == 1 or placement in seen
            ]
            model = self._make()
            model.fit([setups[at] for at in kept], times[kept].tolist())
            self._models.append(model)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the geometric mean of the models' forecasts."""
        out: np.ndarray = np.exp(
            np.mean([np.log(model.predict(setups)) for model in self._models], axis=0)
        )
        return out


_FEW = 12
"""Number of measurements below which trees cannot learn anything."""


class Hybrid:
    """Geometric mean of two models that fail in different ways.

    One has boosted trees over one device's time; the other has boosted trees over fits of
    ``Overlapping`` to subsets of the placements. The trees learn the logarithm of the base model's
    residual, by absolute error because some measurements are outliers.

    Beyond the measurements, trees are constant. Over one device's time, the forecast is then too
    low where exchange keeps growing. Over fitted physics, it is too high where exchange saturates.

    Args:
        seed: seed of the trees.

    >>> model = Hybrid()
    >>> setups = [
    ...     Setup(placement=(1,) * n, batch=b) for n in (1, 2, 4, 8) for b in (8, 16, 24, 32)
    ... ]
    >>> model.fit(setups, [0.1 * s.batch + 0.2 * (s.num_devices > 1) for s in setups])
    >>> model.predict([Setup(placement=(1,) * 4, batch=20)]).round(1).tolist()
    [2.2]
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._members: list[tuple[StepTimeModel, Any]] = []

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit base models and trees.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
            MissingExtraError: scipy or scikit-learn is not installed.
        """
        times = checked(setups, step_s)
        bases: list[StepTimeModel] = [PerfectScaling(), Bagged(Overlapping, seed=self._seed)]
        self._members = []
        for at, base in enumerate(bases):
            base.fit(setups, step_s)
            trees = None
            if len(times) >= _FEW:
                trees = _trees(self._seed + at)
                known = base.predict(setups)
                trees.fit(_features_with_physics(setups), np.log(times / known))
            self._members.append((base, trees))
        if len(times) < _FEW:
            self._members = self._members[1:]  # the physical model alone

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the geometric mean of both forecasts."""
        logs = []
        for base, trees in self._members:
            known = base.predict(setups)
            more = 0.0 if trees is None else trees.predict(_features_with_physics(setups))
            logs.append(np.log(known) + more)
        out: np.ndarray = np.exp(np.mean(logs, axis=0))
        return out


def _features_with_physics(setups: Sequence[Setup]) -> np.ndarray:
    """Return features of the setup alone.

    Physical forecasts are no features: they would lead the trees beyond their measurements.
    """
    columns = Columns.of(setups)
    spread = [np.std(setup.placement) for setup in setups]
    fullest = [sum(num == max(setup.placement) for num in setup.placement) for setup in setups]
    return np.stack(
        [
            np.log(columns.batch),
            np.log2(columns.nodes),
            np.log2(columns.devices),
            columns.devices / columns.nodes,
            columns.most,
            columns.least,
            np.asarray(fullest, float),
            np.asarray(spread, float),
        ],
        1,
    )


def _trees(seed: int) -> Any:
    HistGradientBoostingRegressor = require(
        "sklearn.ensemble", package="scikit-learn", extra="cloud"
    ).HistGradientBoostingRegressor
    return HistGradientBoostingRegressor(
        loss="absolute_error",
        max_iter=300,
        learning_rate=0.06,
        max_leaf_nodes=8,
        min_samples_leaf=5,
        l2_regularization=1.0,
        max_features=0.7,
        early_stopping=False,
        random_state=seed,
    )
