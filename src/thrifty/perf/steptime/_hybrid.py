"""Step times as a sum of overlapping phases, with boosted trees for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thrifty.core import UsageError, require

from ._model import Columns, PerfectScaling, Setup, SingleDeviceTime, StepTimeModel, checked


_STARTS = (1.5, 6.0)
"""Initial overlaps of the fit: little and nearly full; the better result is kept."""

_OUTLIER = 0.1
"""Relative error above which a measurement's loss is linear instead of quadratic."""

_PENALTY = 1e-2
"""Penalty on coefficients; it keeps those small that few measurements leave undetermined."""


_PLAIN = 1e-3
"""Penalty on overlap, as in AdaptDL's ``_fit_perf_params``.

Where little is exchanged, any overlap explains the measurements, and a sharp one says nothing about
larger scales.
"""


class Overlapping:
    """``T = ((k F)^g + C^g)^(1/g)``: step time from compute and exchange.

    ``F`` is one device's time, ``C`` the exchange with non-negative terms of the placement, and
    ``g`` the overlap from 1 (none) upwards. This is Pollux' form with more terms: devices of a
    machine share its network, so the fullest machine counts as well as the number of machines. The
    fit minimises relative errors with a robust loss (pseudo-Huber).

    >>> model = Overlapping()
    >>> setups = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 4, 8)]
    >>> model.fit(setups, [1.0, 1.5, 2.0, 2.5])
    >>> model.predict([Setup(placement=(1,) * 4, batch=8)]).round(1).tolist()
    [2.0]
    """

    _alone: SingleDeviceTime
    _fitted: _Fitted

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit exchange and overlap.

        Raises:
            UsageError: Nothing was measured, or a time is not positive.
            MissingExtraError: scipy is not installed.
        """
        times = checked(setups, step_s)
        columns = Columns.of(setups)
        self._alone = SingleDeviceTime(columns, times)
        self._fitted = _fit(terms(columns), self._alone(columns.batch), times)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the forecasts of the fitted coefficients."""
        columns = Columns.of(setups)
        return self._fitted.seconds(self._alone(columns.batch), self.exchange_s(setups))

    def exchange_s(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the seconds of exchange alone, [setups]."""
        out: np.ndarray = terms(Columns.of(setups)) @ self._fitted.weights
        return out

    @property
    def overlap(self) -> float:
        """Fitted overlap ``g``; 1 is none."""
        return self._fitted.overlap


def overlapped(compute_s: np.ndarray, exchange_s: np.ndarray, overlap: float) -> np.ndarray:
    """Return the norm of both, with the larger one factored out so that no power overflows."""
    top = np.maximum(compute_s, exchange_s)
    ratio = np.minimum(compute_s, exchange_s) / top
    out: np.ndarray = top * (1 + ratio**overlap) ** (1 / overlap)
    return out


def terms(columns: Columns) -> np.ndarray:
    """Return the terms of the exchange without coefficients, [setups, terms]; 0 for one device."""
    apart, together = columns.apart, columns.together
    nodes, devices, most = columns.nodes, columns.devices, columns.most
    return np.stack(
        [
            together,
            together * devices,
            together * np.log2(devices),
            apart,
            apart * np.log2(nodes),
            apart * (nodes - 1),
            apart * most,
            apart * (devices - 1),
            apart * np.log2(devices),
            apart * (most - columns.least),
            apart * (most - 1) * (nodes - 1),
            apart * np.sqrt(devices),
        ],
        1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    weights: np.ndarray
    overlap: float
    factor: float

    def seconds(self, alone_s: np.ndarray, exchange_s: np.ndarray) -> np.ndarray:
        return overlapped(self.factor * alone_s, exchange_s, self.overlap)


class _Loss(NamedTuple):
    """Loss of ``[weights | overlap | factor]``, with its gradient."""

    basis: np.ndarray
    alone_s: np.ndarray
    logs: np.ndarray

    def __call__(self, params: np.ndarray) -> tuple[float, np.ndarray]:
        weights, overlap, factor = params[:-2], params[-2], params[-1]
        # A tiny exchange keeps the logarithm's gradient finite where there is none.
        exchange = self.basis @ weights + 1e-9 * self.alone_s
        compute = factor * self.alone_s
        top = np.maximum(compute, exchange)
        log_a, log_c = np.log(compute / top), np.log(exchange / top)
        a, c = np.exp(overlap * log_a), np.exp(overlap * log_c)
        total = a + c
        error = np.log(top) + np.log(total) / overlap - self.logs
        size = np.sqrt(1 + (error / _OUTLIER) ** 2)
        slope = error / size / len(error) / _OUTLIER**2
        by_overlap = -np.log(total) / overlap**2 + (a * log_a + c * log_c) / total / overlap
        value = np.mean(size - 1) + _PENALTY * weights.sum() + _PLAIN * (overlap - 1) ** 2
        gradient = [
            self.basis.T @ (slope * c / total / exchange) + _PENALTY,
            [slope @ by_overlap + 2 * _PLAIN * (overlap - 1), (slope @ (a / total)) / factor],
        ]
        return float(value), np.concatenate(gradient)


def _fit(basis: np.ndarray, alone_s: np.ndarray, times: np.ndarray) -> _Fitted:
    minimize = require("scipy.optimize", extra="cloud").minimize
    # Scale all terms to the size of a step, so that the penalty means the same for each of them. A
    # term that no measurement shows stays 0.
    most = basis.max(axis=0)
    scale = np.where(most > 0, np.median(times) / np.where(most > 0, most, 1.0), 0.0)
    loss = _Loss(basis * scale, alone_s, np.log(times))
    num = basis.shape[1]
    bounds = [(0.0, None)] * num + [(1.0, 20.0), (0.9, 1.15)]
    ends = [
        minimize(
            loss,
            np.array([0.05] * num + [start, 1.0]),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            # A good fit has a loss far below 1, for which scipy's default tolerances are too wide.
            options={"maxiter": 2000, "ftol": 1e-12, "gtol": 1e-8},
        )
        for start in _STARTS
    ]
    best = min(ends, key=lambda end: float(end.fun)).x
    return _Fitted(weights=best[:-2] * scale, overlap=float(best[-2]), factor=float(best[-1]))


_LEAST = 3
"""Least number of placements in a subset, if there are enough."""


class Bagged:
    """Geometric mean of several fits, each to a subset of the placements of several devices.

    A single fit's forecasts beyond the largest measured scale may depend on a few placements. What
    most subsets agree on does not (bagging, Breiman 1996, by groups).

    Args:
        make: Function that makes a model.
        num: Number of fits.
        share: Share of the placements that each fit sees.
        seed: Seed of the subsets.

    Raises:
        UsageError: A number is out of range.

    >>> from thrifty.perf.steptime import Overlapping
    >>> model = Bagged(Overlapping)
    >>> setups = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 4, 8)]
    >>> model.fit(setups, [1.0, 1.5, 1.75, 1.875])
    >>> model.predict([Setup(placement=(1,) * 16, batch=8)]).round(1).tolist()
    [2.1]
    """

    def __init__(
        self, make: Callable[[], StepTimeModel], *, num: int = 8, share: float = 0.6, seed: int = 0
    ) -> None:
        if num < 1 or not 0 < share <= 1:
            raise UsageError(
                f"`num` must be at least 1 and `share` from 0 to 1, got num={num}, share={share}"
            )
        self._make = make
        self._num = num
        self._share = share
        self._seed = seed
        self._models: list[StepTimeModel] = []

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit all models."""
        times = np.asarray(step_s, float)
        placements = [tuple(sorted(setup.placement)) for setup in setups]  # (4, 2) equals (2, 4)
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
        seed: Seed of the trees.

    >>> model = Hybrid()
    >>> setups = [Setup(placement=(1,) * n, batch=b) for n in (1, 2, 4, 8) for b in (8, 16, 24, 32)]
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
            UsageError: Nothing was measured, or a time is not positive.
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
