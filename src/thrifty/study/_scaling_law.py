"""Scaling laws: how the metric falls with the horizon, and with the size of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from thrifty.core import UsageError, derive_seed, require
from thrifty.space import Amount, Config, TimeUnit
from thrifty.space._ladder import averaged_by
from thrifty.space._units import EPOCHS

from ._results import TrialResult, lines


FloatArray = npt.NDArray[np.float64]
Form = Literal["chinchilla", "broken"]
Size = str | Callable[[Config], float]
"""The hyper-parameter that is the model's size, or a function of a configuration."""

HUBER = 1e-3
"""Residuals of logarithms beyond which the loss is linear, as in Hoffmann et al."""
NUM_POLISHED = 6
"""How many of the best starts are optimised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The metric that a scaling law predicts.

    Attributes:
        value: The predicted metric.
        interval: The confidence interval of the fitted curve.
        prediction_interval: The interval of the metric of one more run, which is wider.
    """

    value: float
    interval: tuple[float, float]
    prediction_interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """A scaling law fitted to a study's trials at the ends of their horizons.

    Attributes:
        form: ``"chinchilla"`` or ``"broken"``.
        metric: The metric that it predicts.
        parameters: The parameters by name: ``E`` is the limit, ``B`` and ``b`` belong to the
            horizon, ``A`` and ``a`` to the size; a broken law has ``b``, ``c``, ``d`` and ``f``.
        intervals: The confidence interval of each parameter.
        level: The probability that intervals have.
        horizons: The horizons of the points, in ``unit``.
        values: The metric of each point.
        sizes: The model size of each point; empty for a law in the horizon alone.
        trials: The trial of each point.
        residual_sd: The standard deviation of the residuals of the logarithms: a share.
        unit: The unit of horizons, which is the study's: epochs, steps or tokens.
    """

    form: Form
    metric: str
    parameters: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    level: float
    horizons: tuple[float, ...]
    values: tuple[float, ...]
    sizes: tuple[float, ...]
    trials: tuple[int, ...]
    residual_sd: float
    unit: TimeUnit = EPOCHS
    _fit: _Fit = field(repr=False, compare=False)

    @property
    def formula(self) -> str:
        """The law as text, with ``D`` for the horizon and ``N`` for the size."""
        if self.form == "broken":
            return f"{self.metric} = E + B D^-b (1 + (D/d)^(1/f))^(-c f)"
        size = " + A / N^a" if self.sizes else ""
        return f"{self.metric} = E{size} + B / D^b"

    def predict(self, horizon: float, *, size: float | None = None) -> Prediction:
        """Return the metric at a horizon, and at a model size if the law has one.

        Args:
            horizon: A number of ``unit``, or an amount such as ``th.steps(50_000)``.
            size: The size of the model.

        Raises:
            UsageError: The horizon or the size is not above 0, the horizon has a unit that is
                neither the law's nor epochs, or a size is missing or not part of the law.
        """
        at = self._number(horizon) if isinstance(horizon, Amount) else horizon
        if not at > 0 or (size is not None and not size > 0):
            raise UsageError(f"predict({horizon!r}, size={size!r}): both must be above 0")
        if (size is None) != (not self.sizes):
            wanted = "give predict(size=...)" if self.sizes else "leave size out"
            raise UsageError(f"predict(size={size!r}): the law is {self.formula}; {wanted}")
        return self._fit.predict(at, size, level=self.level)

    def _number(self, horizon: Amount) -> float:
        """Return an amount as a number of the law's unit."""
        if horizon.unit == self.unit.name:
            return float(horizon.number)
        if horizon.unit == "epochs":
            return float(horizon.number * self.unit.per_epoch)
        raise UsageError(
            f"predict({horizon!r}): the law counts {self.unit.name}; give thrifty."
            f"{self.unit.name}(...) or a number of {self.unit.name}"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return lines("Scaling law", self._lines())

    def _lines(self) -> list[str]:
        first, last = min(self.horizons), max(self.horizons)
        span = f"{first:,.0f} to {last:,.0f} {self.unit.name}"
        out = [
            f"{self.formula}, with D in {self.unit.name}",
            f"fitted to {len(self.values)} trials at the ends of their horizons ({span})",
            f"standard deviation of residuals: {self.residual_sd:.2%}",
        ]
        for name, value in self.parameters.items():
            low, high = self.intervals[name]
            out.append(f"{name} = {value:.4g}  [{low:.4g}, {high:.4g}]")
        out.append(f"intervals have a probability of {self.level:.0%}, by a bootstrap")
        return out


def fit_scaling_law(  # noqa: PLR0913 (the options of Study.fit_scaling_law, and the study)
    trials: Sequence[TrialResult],
    *,
    metric: str,
    mode: str,
    form: Form = "chinchilla",
    size: Size | None = None,
    where: Callable[[TrialResult], bool] | None = None,
    average: str = "",
    best_only: bool = True,
    level: float = 0.95,
    num_bootstraps: int = 200,
    seed: int = 0,
) -> ScalingLaw:
    """Fit a scaling law to results; see ``Study.fit_scaling_law``.

    Raises:
        UsageError: There are too few points, or an option is invalid.
        MissingExtraError: SciPy is not installed.
    """
    _check_options(form, size, mode=mode, level=level, num_bootstraps=num_bootstraps)
    points = _points(trials, size=size, where=where, average=average, best_only=best_only)
    law = _Law(form=form, sized=size is not None)
    _check_points(points, law, metric=metric)
    x = np.array([[point.horizon, point.size] for point in points])
    y = np.array([point.value for point in points])
    fit = _Fit.of(law, x, y, num_bootstraps=num_bootstraps, seed=derive_seed(seed, "scaling law"))
    parameters = fit.parameters(fit.best)
    samples = np.array([list(fit.parameters(sample).values()) for sample in fit.samples])
    low, high = np.quantile(samples, _tails(level), axis=0)
    return ScalingLaw(
        form=form,
        metric=metric,
        parameters=parameters,
        intervals={
            name: (float(a), float(b)) for name, a, b in zip(parameters, low, high, strict=True)
        },
        level=level,
        horizons=tuple(point.horizon for point in points),
        values=tuple(point.value for point in points),
        sizes=tuple(point.size for point in points) if size is not None else (),
        trials=tuple(point.trial for point in points),
        residual_sd=fit.residual_sd,
        unit=trials[0].unit if trials else EPOCHS,
        _fit=fit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    horizon: float
    size: float
    value: float
    trial: int


def _points(
    trials: Sequence[TrialResult],
    *,
    size: Size | None,
    where: Callable[[TrialResult], bool] | None,
    average: str,
    best_only: bool,
) -> list[_Point]:
    """Return the points to fit: trials at the ends of their horizons, in a fixed order."""
    out = [
        _Point(
            horizon=float(trial.unit.count(trial.epochs)),
            size=_size_of(trial, size),
            value=trial.value,
            trial=trial.number,
        )
        for trial in trials
        if trial.state == "done"
        and trial.value is not None
        and averaged_by(trial.config) == average
        and (where is None or where(trial))
    ]
    if best_only:
        best: dict[tuple[float, float], _Point] = {}
        for point in sorted(out, key=lambda p: (p.value, p.trial)):
            best.setdefault((point.horizon, point.size), point)
        out = list(best.values())
    return sorted(out, key=lambda p: (p.size, p.horizon, p.trial))


def _size_of(trial: TrialResult, size: Size | None) -> float:
    if size is None:
        return 1.0
    found = trial.config.get(size) if isinstance(size, str) else size(trial.config)
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise UsageError(
            f"fit_scaling_law(size={size!r}): trial {trial.number} has the size {found!r}; it must "
            "be a number above 0, such as the number of parameters"
        )
    return float(found)


def _check_options(
    form: object, size: object, *, mode: str, level: float, num_bootstraps: int
) -> None:
    if form not in get_args(Form):
        raise UsageError(
            f"fit_scaling_law(form={form!r}): give one of {', '.join(map(repr, get_args(Form)))}"
        )
    if form == "broken" and size is not None:
        raise UsageError("fit_scaling_law(form='broken') has no size; use form='chinchilla'")
    if mode != "min":
        raise UsageError(
            "fit_scaling_law() describes a metric that falls towards a limit, but the study "
            "maximises its first metric; let the task report a loss and minimise it"
        )
    if not 0 < level < 1:
        raise UsageError(f"fit_scaling_law(level={level!r}): give a probability, such as 0.95")
    if isinstance(num_bootstraps, bool) or num_bootstraps < 20:
        raise UsageError(
            f"fit_scaling_law(num_bootstraps={num_bootstraps!r}): give at least 20, because "
            "intervals are quantiles of them"
        )


def _check_points(points: Sequence[_Point], law: _Law, *, metric: str) -> None:
    """Raise UsageError unless the points determine the law."""
    needed, num_horizons = law.num_parameters + 2, len({point.horizon for point in points})
    num_sizes = len({point.size for point in points})
    wanted = 3 if law.form == "chinchilla" else law.num_parameters
    if len(points) < needed or num_horizons < wanted or (law.sized and num_sizes < 3):
        sizes = f" and 3 sizes, got {num_sizes}" if law.sized else ""
        raise UsageError(
            f"a {law.form} law has {law.num_parameters} parameters and needs at least {needed} "
            f"trials at the ends of {wanted} or more different horizons, got {len(points)} trials "
            f"at {num_horizons}{sizes}; add horizons to the ladder, or choose a law with fewer "
            "parameters"
        )
    bad = [point for point in points if not point.value > 0]
    if bad:
        raise UsageError(
            f"fit_scaling_law() takes logarithms, but {metric} of trial {bad[0].trial} is "
            f"{bad[0].value!r}; use a metric that is above 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """The shape of a law: its parameters as a vector without constraints on their signs.

    Horizons and sizes are given as logarithms, centred, so that starts are near the answer. The
    logarithm of each term is linear or nearly so, and the law is their log-sum-exp.
    """

    form: Form
    sized: bool = False

    @property
    def num_parameters(self) -> int:
        return 6 if self.form == "broken" else 5 if self.sized else 3

    def log_value(self, theta: FloatArray, x: FloatArray) -> FloatArray:
        """Return the logarithm of the law at centred log horizons and sizes, shape (n, 2)."""
        terms = [np.full(len(x), theta[0]), theta[1] + self._log_shape(theta[2:], x[:, 0])]
        if self.sized:
            terms.append(theta[3] - theta[4] * x[:, 1])
        return np.asarray(np.logaddexp.reduce(terms, axis=0))

    def gradient(self, theta: FloatArray, x: FloatArray) -> FloatArray:
        """Return the derivatives of ``log_value`` by the parameters, shape (n, parameters)."""
        at = x[:, 0]
        terms = [np.full(len(x), theta[0]), theta[1] + self._log_shape(theta[2:], at)]
        if self.sized:
            terms.append(theta[3] - theta[4] * x[:, 1])
        shares = np.exp(np.array(terms) - np.logaddexp.reduce(terms, axis=0))
        columns = [shares[0], shares[1], -shares[1] * at]
        if self.form == "broken":
            more, width = theta[3], math.exp(theta[5])
            z = (at - theta[4]) / width
            soft, sigmoid = np.logaddexp(0.0, z), 1.0 / (1.0 + np.exp(-z))
            columns += [
                -shares[1] * width * soft,
                shares[1] * more * sigmoid,
                -shares[1] * more * width * (soft - z * sigmoid),
            ]
        if self.sized:
            columns += [shares[2], -shares[2] * x[:, 1]]
        return np.stack(columns, axis=1)

    def _log_shape(self, bend: FloatArray, x: FloatArray) -> FloatArray:
        """Return the logarithm of the horizon's term without its factor."""
        if self.form == "chinchilla":
            return np.asarray(-bend[0] * x)
        slope, more, at, width = bend[0], bend[1], bend[2], math.exp(bend[3])
        return np.asarray(-slope * x - more * width * np.logaddexp(0.0, (x - at) / width))

    def starts(self, x: FloatArray, y: FloatArray) -> list[FloatArray]:
        """Return starts: exponents from a grid, factors by non-negative least squares."""
        nnls = require("scipy.optimize", extra="search").nnls
        exponents = np.geomspace(0.05, 2.0, 12)
        bends: list[tuple[float, ...]]
        if self.form == "broken":
            places = np.quantile(x[:, 0], [0.25, 0.5, 0.75])
            widths = np.log([0.1, 0.4])
            bends = list(product(exponents[::2], (-0.2, 0.3, 0.8), places, widths))
        else:
            bends = [(float(exponent),) for exponent in exponents]
        out = []
        for bend in bends:
            shape = np.exp(self._log_shape(np.array(bend), x[:, 0]))
            for exponent in exponents if self.sized else (0.0,):
                columns = [np.ones(len(x)), shape]
                if self.sized:
                    columns.append(np.exp(-exponent * x[:, 1]))
                # Relative errors count, as in the fit itself.
                factors, _ = nnls(np.stack(columns, axis=1) / y[:, None], np.ones(len(x)))
                logs = np.log(np.maximum(factors, 1e-6 * y.min()))
                size = (logs[2], exponent) if self.sized else ()
                out.append(np.array([logs[0], logs[1], *bend, *size]))
        return out

    def bounds(self, x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the lower and the upper bounds of the parameters."""
        least, most = math.log(y.min()), math.log(y.max())
        low, high = [least - 15, least - 15, 0.0], [least, most + 15, 5.0]
        if self.form == "broken":
            low += [-5.0, x[:, 0].min(), math.log(0.02)]
            high += [5.0, x[:, 0].max(), math.log(3.0)]
        if self.sized:
            low += [least - 15, 0.0]
            high += [most + 15, 5.0]
        return np.array(low), np.array(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A fitted law, and its fits to bootstrap samples."""

    law: _Law
    centre: FloatArray
    best: FloatArray
    residual_sd: float
    """Standard deviation of the residuals, with the degrees of freedom that are left."""
    samples: FloatArray
    """One row of parameters for each bootstrap sample."""
    noise: FloatArray
    """Noise of one more run for each bootstrap sample, which prediction intervals add."""

    @classmethod
    def of(cls, law: _Law, x: FloatArray, y: FloatArray, *, num_bootstraps: int, seed: int) -> _Fit:
        logs = np.log(x)
        centre = logs.mean(axis=0)
        best = fitted(law, logs - centre, y)
        smooth = law.log_value(best, logs - centre)
        freedom = len(y) - law.num_parameters
        sd = math.sqrt(float(np.sum((np.log(y) - smooth) ** 2)) / freedom)
        rng = np.random.default_rng(seed)
        # Normal noise, because a robust fit passes through some points, so that a draw from its few
        # residuals would be too small. The chi-squared draws say how little is known of their size.
        sds = sd * np.sqrt(freedom / rng.chisquare(freedom, size=num_bootstraps))
        draws = sds[:, None] * rng.normal(size=(num_bootstraps, len(y)))
        samples = [fitted(law, logs - centre, np.exp(smooth + draw), start=best) for draw in draws]
        return cls(
            law=law,
            centre=centre,
            best=best,
            residual_sd=sd,
            samples=np.array(samples),
            noise=sds * rng.normal(size=num_bootstraps),
        )

    def parameters(self, theta: FloatArray) -> dict[str, float]:
        """Return parameters by name, of horizons and sizes that are not centred."""
        at_d, at_n = self.centre
        slope = float(theta[2])
        out = {"E": math.exp(theta[0]), "B": _exp(theta[1] + slope * at_d), "b": slope}
        if self.law.form == "broken":
            out |= {"c": float(theta[3]), "d": _exp(theta[4] + at_d), "f": math.exp(theta[5])}
        if self.law.sized:
            out |= {"A": _exp(theta[3] + theta[4] * at_n), "a": float(theta[4])}
        return out

    def predict(self, horizon: float, size: float | None, *, level: float) -> Prediction:
        """Return the predicted metric with its intervals."""
        x = np.log([[horizon, 1.0 if size is None else size]]) - self.centre
        curves = np.array([self.law.log_value(theta, x)[0] for theta in self.samples])
        low, high = np.exp(np.quantile(curves, _tails(level)))
        worst, best = np.exp(np.quantile(curves + self.noise, _tails(level)))
        return Prediction(
            value=float(np.exp(self.law.log_value(self.best, x)[0])),
            interval=(float(low), float(high)),
            prediction_interval=(float(worst), float(best)),
        )


def fitted(
    law: _Law, x: FloatArray, y: FloatArray, *, start: FloatArray | None = None
) -> FloatArray:
    """Return the parameters with the least sum of Huber losses of log residuals.

    Without a start, the best of many are optimised, because the loss has local minima.
    """
    least_squares: Any = require("scipy.optimize", extra="search").least_squares
    logs, (low, high) = np.log(y), law.bounds(x, y)

    def residuals(theta: FloatArray) -> FloatArray:
        return law.log_value(theta, x) - logs

    def gradient(theta: FloatArray) -> FloatArray:
        return law.gradient(theta, x)

    def loss(theta: FloatArray) -> float:
        return huber_loss(residuals(theta))

    starts = [start] if start is not None else sorted(law.starts(x, y), key=loss)[:NUM_POLISHED]
    margin = 1e-9 * (high - low)
    found = []
    for each in starts:
        at = np.clip(each, low + margin, high - margin)
        # First by squares, which are smooth, then by the Huber loss.
        for kind in ("linear", "huber") if start is None else ("huber",):
            at = least_squares(
                residuals,
                np.clip(at, low + margin, high - margin),
                jac=gradient,
                bounds=(low, high),
                loss=kind,
                f_scale=HUBER,
                x_scale="jac",
                xtol=1e-9,
                ftol=1e-9,
                gtol=1e-12,
                max_nfev=300 if start is None else 60,
            ).x
        found.append(at)
    return min(found, key=loss)


def huber_loss(residuals: FloatArray) -> float:
    """Return the sum of Huber losses: half the square up to ``HUBER``, linear beyond.

    >>> huber_loss(np.array([0.0, 1e-4])) == 0.5e-8, huber_loss(np.array([1.0])) < 1e-3
    (True, True)
    """
    size = np.abs(residuals)
    losses = np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
    return float(losses.sum())


def _tails(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]


def _exp(exponent: float) -> float:
    """Return the exponential, or infinity where it is too large for a float."""
    return math.exp(exponent) if exponent < 709 else math.inf
