"""Published models of step times, with which ours are compared: Ernest, Paleo, Pollux, boosting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.core import require
from thrifty.perf.steptime import Setup
from thrifty.perf.steptime._model import Columns, SingleDeviceTime, checked, relative_fit


_LEAST = 1e-6
"""Lower bound of forecasts, as a share of the shortest measured step."""


def least_of(times: np.ndarray) -> float:
    """Return the lower bound of forecasts.

    It keeps a sum positive when all its terms vanish, as exchange terms do for one device.
    """
    return _LEAST * float(times.min())


class Ernest:
    """``t = a + b scale / m + c log m + d m``, by non-negative least squares.

    For a training step, the scale per machine is the batch of one device.
    """

    _weights: np.ndarray
    _least: float

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the four terms."""
        times = checked(setups, step_s)
        self._weights = relative_fit(_terms(setups), times)
        self._least = least_of(times)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the forecasts of the four terms."""
        out: np.ndarray = np.maximum(_terms(setups) @ self._weights, self._least)
        return out


def _terms(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [np.ones_like(columns.batch), columns.batch, np.log(columns.devices), columns.devices], 1
    )


class Paleo:
    """One device's time, plus a ring between machines and a ring inside them, without overlap.

    The published model takes bytes, FLOPs and peak speeds, and fits which share of its peak a
    platform reaches. Fitted coefficients of the three terms have the same freedom, and need no data
    sheets.
    """

    _alone: SingleDeviceTime
    _weights: np.ndarray
    _least: float

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the cost of the rings."""
        times = checked(setups, step_s)
        self._alone = SingleDeviceTime(Columns.of(setups), times)
        self._weights = relative_fit(self._terms(setups), times)
        self._least = least_of(times)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the time of compute plus rings."""
        out: np.ndarray = np.maximum(self._terms(setups) @ self._weights, self._least)
        return out

    def _terms(self, setups: Sequence[Setup]) -> np.ndarray:
        columns = Columns.of(setups)
        rings = [(n - 1) / n for n in (columns.nodes, columns.most)]
        return np.stack([self._alone(columns.batch), *rings], 1)


_TINY = 1e-8
"""Lower bound of a parameter, in units of a typical step."""

_A, _B, _A_N, _B_N, _A_R, _B_R = range(6)


class Pollux:
    """``(T_acc^g + T_net^g)^(1/g)``, with compute ``T_acc`` and exchange ``T_net``.

    ``T_acc = a + b batch`` and ``T_net = a_n + b_n max(devices - 2, 0)``, with other coefficients
    inside a machine. L-BFGS-B fits the seven parameters to the root mean squared log error, plus
    ``1e-3 (g - 1)^2`` and ``1e-2 (b_n / a_n)^2`` for both networks. Parameters that no measurement
    determines are held fixed (AdaptDL's ``fit_perf_params``).
    """

    _params: np.ndarray

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the parameters.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
            MissingExtraError: scipy is not installed.
        """
        times = checked(setups, step_s)
        minimize = require("scipy.optimize", extra="cloud").minimize
        columns = Columns.of(setups)
        # Use typical steps and batches as units: numerical gradients need parameters of similar
        # size.
        step, size = float(np.median(times)), float(np.median(columns.batch))
        units = np.array([step, step / size, step, step, step, step, 1.0])

        def loss(scaled: np.ndarray) -> float:
            params = scaled * units
            errors = np.log(_seconds(params, columns)) - np.log(times)
            spread = (params[_B_N] / params[_A_N]) ** 2 + (params[_B_R] / params[_A_R]) ** 2
            return float(np.sqrt(np.mean(errors**2)) + 1e-3 * (params[-1] - 1) ** 2 + 1e-2 * spread)

        start, bounds = _start(columns, times / step, size)
        self._params = minimize(loss, start, method="L-BFGS-B", bounds=bounds).x * units

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the forecasts of the fitted parameters."""
        return _seconds(self._params, Columns.of(setups))


def _start(
    columns: Columns, steps: np.ndarray, size: float
) -> tuple[list[float], list[tuple[float, float | None]]]:
    """Return start and bounds of the search, in units of typical steps and batches of ``size``."""
    small = float(steps.min())
    slope = float(np.median(steps / columns.batch)) * size
    start = [small / 2, slope / 2, small / 2, small / 100, small / 4, small / 100, 1.5]
    bounds: list[tuple[float, float | None]] = [*[(_TINY, None)] * 6, (1.0, 10.0)]
    fixed = {}
    if len(np.unique(columns.batch)) == 1:
        fixed[_A] = float(np.mean(steps[columns.devices == columns.devices.min()])) / 2
    if not columns.apart.any():
        fixed |= {_A_N: _TINY, _B_N: _TINY}
    if not columns.together.any():
        fixed |= {_A_R: _TINY, _B_R: _TINY}
    if columns.devices.max() <= 2:
        fixed |= {_B_N: _TINY, _B_R: _TINY}
    for at, value in fixed.items():
        start[at], bounds[at] = value, (value, value)
    return start, bounds


def _seconds(params: np.ndarray, columns: Columns) -> np.ndarray:
    a, b, a_n, b_n, a_r, b_r, gamma = params
    more = np.maximum(columns.devices - 2, 0)
    net = columns.apart * (a_n + b_n * more) + columns.together * (a_r + b_r * more)
    compute = a + b * columns.batch
    # Factor the larger one out of the root, so that no power overflows.
    top = np.maximum(compute, net)
    out: np.ndarray = top * ((compute / top) ** gamma + (net / top) ** gamma) ** (1 / gamma)
    return out


class Boosting:
    """Scikit-learn's ``GradientBoostingRegressor`` with its defaults, on the log time.

    Args:
        seed: seed of the learner.
    """

    def __init__(self, *, seed: int = 0) -> None:
        GradientBoostingRegressor = require(
            "sklearn.ensemble", package="scikit-learn", extra="cloud"
        ).GradientBoostingRegressor
        self._learner = GradientBoostingRegressor(random_state=seed)

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the trees."""
        self._learner.fit(_features(setups), np.log(checked(setups, step_s)))

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the trees' forecasts; beyond the measurements they are constant."""
        out: np.ndarray = np.exp(self._learner.predict(_features(setups)))
        return out


def _features(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [
            np.log(columns.batch),
            np.log2(columns.nodes),
            np.log2(columns.devices),
            columns.most,
            columns.least,
        ],
        1,
    )
