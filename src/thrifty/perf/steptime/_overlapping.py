"""Partly overlapping compute and exchange, with fitted costs of placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thrifty.core import (
    require,
)

from ._model import Columns, Setup, SingleDeviceTime, checked


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
            UsageError: nothing was measured, or a time is not positive.
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
