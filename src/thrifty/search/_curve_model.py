"""A Gaussian process of learning curves: scores over configurations, epochs and schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NUM_FITTED = 72
"""Rows by which hyper-parameters are compared; predictions use all rows."""
NUM_ROUNDS = 2
"""Times that the search for hyper-parameters goes through all of them."""
TEMPER = 0.2
"""Power of the evidence by which exponents are weighted; 1 is too sure where curves misfit."""
MEMORY = 0.7
"""Length, in logarithms of time, over which deviations of one curve are forgotten."""
JITTER = 1e-6
COMMON, COMMON_WIGGLE = 1.0, 0.03
"""Variances of what all curves have in common: level and slope, and smooth deviations."""


class CannotFit(Exception):  # noqa: N818 (it is no error of the user's)
    """The model cannot be fitted to these rows; the caller has a fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Places on learning curves.

    Attributes:
        points: Configurations in the unit cube, ``[n, d]``; NaN for absent coordinates.
        times: Epochs as shares of the longest training, ``[n]``, above 0 and up to 1.
        decays: How far each scheduled hyper-parameter has decayed there, ``[n, s]``, from 0 to 1.
        paths: Ids of the configurations' first epochs, ``[n, p]``, short prefixes first. Rows of
            one curve are equal; configurations that share a prefix agree in the first ids.
    """

    points: FloatArray
    times: FloatArray
    decays: FloatArray
    paths: IntArray

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: npt.NDArray[np.intp] | slice) -> Self:
        return replace(
            self,
            points=self.points[index],
            times=self.times[index],
            decays=self.decays[index],
            paths=self.paths[index],
        )

    def joined(self, other: Rows) -> Self:
        """Return these rows, then the others."""
        return replace(
            self,
            points=np.concatenate([self.points, other.points]),
            times=np.concatenate([self.times, other.times]),
            decays=np.concatenate([self.decays, other.decays]),
            paths=np.concatenate([self.paths, other.paths]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Hyper-parameters of the kernel, as indices into the levels of ``LEVELS``.

    Attributes:
        lengths: For each coordinate, over which distance scores are alike.
        shared: Share of the variance that the configuration explains; the rest is a trial's own.
        slope: Variance of slopes over time, and of effects of decay, against that of levels.
        wiggle: Variance of smooth deviations of one curve.
        noise: Variance of single scores.
        power: Exponent of the power law by which curves approach their ends.
    """

    lengths: tuple[int, ...]
    shared: int = 1
    slope: int = 1
    wiggle: int = 1
    noise: int = 1
    power: int = 1

    def neighbours(self, name: str, place: int = 0) -> Iterator[Setting]:
        """Yield the settings that differ by one level in one hyper-parameter."""
        now = self.lengths[place] if name == "lengths" else getattr(self, name)
        for level in (now - 1, now + 1):
            if not 0 <= level < len(LEVELS[name]):
                continue
            if name == "lengths":
                lengths = (*self.lengths[:place], level, *self.lengths[place + 1 :])
                yield replace(self, lengths=lengths)
            else:
                changed: dict[str, Any] = {name: level}
                yield replace(self, **changed)


LEVELS: dict[str, tuple[float, ...]] = {
    "lengths": (0.12, 0.3, 0.8, 3.0),
    "shared": (0.3, 0.7, 0.95),
    "slope": (0.3, 1.0, 3.0),
    "wiggle": (0.003, 0.03, 0.2),
    "noise": (0.0001, 0.001, 0.01, 0.1),
    "power": (0.1, 0.4, 1.0),
}
FIRST_LENGTH = 2


class Relations:
    """Distances between two sets of rows, from which each setting makes its covariances."""

    def __init__(self, one: Rows, other: Rows, *, is_choice: npt.NDArray[np.bool_]) -> None:
        self._one, self._other, self._is_choice = one, other, is_choice
        self._slopes: dict[float, FloatArray] = {}

    @cached_property
    def squares(self) -> FloatArray:
        """Squared distances, ``[d, n, m]``; 1 where only one of two rows has a coordinate."""
        a, b = self._one.points.T[:, :, None], self._other.points.T[:, None, :]
        out = np.square(a - b)
        absent = np.isnan(out)
        out[self._is_choice] = out[self._is_choice] > 0
        if absent.any():
            out[absent] = np.broadcast_to(np.isnan(a) != np.isnan(b), out.shape)[absent]
        return out

    @cached_property
    def kinship(self) -> FloatArray:
        """How much of the path two rows share, from 0 to 1, ``[n, m]``."""
        same = self._one.paths[:, None, :] == self._other.paths[None, :, :]
        out: FloatArray = np.logical_and.accumulate(same, axis=2).mean(axis=2)
        return out

    def slopes(self, power: float) -> FloatArray:
        """Products of what moves levels: the distance to the end of a power law, and decays."""
        if power not in self._slopes:
            ahead = np.outer(_ahead(self._one.times, power), _ahead(self._other.times, power))
            self._slopes[power] = ahead + self._one.decays @ self._other.decays.T
        return self._slopes[power]

    @cached_property
    def memory(self) -> FloatArray:
        """Correlation of deviations at two times."""
        one, other = np.log(self._one.times), np.log(self._other.times)
        out: FloatArray = np.exp(-np.abs(one[:, None] - other[None, :]) / MEMORY)
        return out

    def covariance(self, setting: Setting) -> FloatArray:
        """Return the covariances of a setting, without the noise."""
        lengths = np.array([LEVELS["lengths"][level] for level in setting.lengths])
        like = np.exp(-0.5 * np.tensordot(1.0 / lengths**2, self.squares, axes=1))
        shared, slope = LEVELS["shared"][setting.shared], LEVELS["slope"][setting.slope]
        slopes = self.slopes(LEVELS["power"][setting.power])
        moving = 1.0 + slope * slopes
        own = (1.0 - shared) * moving + LEVELS["wiggle"][setting.wiggle] * self.memory
        common = COMMON * (1.0 + slopes) + COMMON_WIGGLE * self.memory
        return common + shared * like * moving + self.kinship * own


def _ahead(times: FloatArray, power: float) -> FloatArray:
    """Return the part of a power law that is still ahead: 0 at the end, 1 at 1 % of the time."""
    out: FloatArray = (times**-power - 1.0) / (0.01**-power - 1.0)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A setting that has seen all rows."""

    setting: Setting
    weight: float
    half: FloatArray
    """Inverse of the Cholesky factor, ``[n, n]``."""
    residuals: FloatArray
    """``half`` times the centred scores."""
    amplitude: float


class CurveModel:
    """Scores of learning curves as a Gaussian process, averaged over a few settings.

    A score is the sum of a course that all curves share, a level and a slope that depend on the
    configuration, and a level, a slope and deviations of each curve's own. Slopes are over the
    logarithm of the epoch, as for power laws, and over the decay of schedules. Settings of the
    kernel are compared by their evidence, one hyper-parameter after the other (Rasmussen and
    Williams, "Gaussian Processes for Machine Learning", 2006, sections 2.3 and 5.4). The curves'
    own parts follow Swersky et al., "Freeze-Thaw Bayesian Optimization", 2014.

    Args:
        rows: Where scores are known.
        scores: The scores, ``[n]``, all finite.
        is_choice: Which coordinates are choices, ``[d]``: all their options are equally far apart.

    Raises:
        CannotFit: The scores are not finite, or a matrix is not positive definite.

    >>> line = np.linspace(0.0, 1.0, 5)
    >>> rows = Rows(
    ...     points=line[:, None],
    ...     times=np.ones(5),
    ...     decays=np.zeros((5, 0)),
    ...     paths=np.arange(5)[:, None],
    ... )
    >>> model = CurveModel(rows, line, is_choice=np.array([False]))
    >>> mean, deviation = model.predict(rows[2:3])
    >>> abs(float(mean[0]) - 0.5) < 0.05, float(deviation[0]) < 0.2
    (True, True)
    """

    def __init__(self, rows: Rows, scores: FloatArray, *, is_choice: npt.NDArray[np.bool_]) -> None:
        if not np.isfinite(scores).all() or len(scores) < 2:
            raise CannotFit
        self._rows, self._scores, self._is_choice = rows, scores, is_choice
        self._centre = float(scores.mean())
        self._settings = _best_settings(rows, scores, is_choice)
        self._fits = self._fit()

    def predict(self, places: Rows) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the noiseless scores at some places."""
        means, variances = self._moments(places)
        weights = np.array([fit.weight for fit in self._fits])
        mean = weights @ means
        variance = weights @ (variances + np.square(means)) - np.square(mean)
        return mean, np.sqrt(np.maximum(variance, 1e-18))

    def exceeds(self, places: Rows, threshold: float) -> FloatArray:
        """Return the logarithm of the probability of each score to be above a threshold."""
        means, variances = self._moments(places)
        weights = np.array([fit.weight for fit in self._fits])
        tails = _log_upper_tail((threshold - means) / np.sqrt(variances))
        out: FloatArray = np.log(weights @ np.exp(np.maximum(tails, -600.0)))
        return out

    def assume(self, places: Rows) -> None:
        """Add places as if their predicted means had been observed there.

        Raises:
            CannotFit: A matrix is not positive definite with them; the model is as before.
        """
        mean, _ = self.predict(places)
        before = self._rows, self._scores
        self._rows, self._scores = self._rows.joined(places), np.concatenate([self._scores, mean])
        try:
            self._fits = self._fit(amplitudes=[fit.amplitude for fit in self._fits])
        except CannotFit:
            self._rows, self._scores = before
            raise

    @property
    def noise(self) -> float:
        """Standard deviation of a single score around its curve."""
        return math.sqrt(
            sum(f.weight * f.amplitude * LEVELS["noise"][f.setting.noise] for f in self._fits)
        )

    def _fit(self, amplitudes: Sequence[float] | None = None) -> list[_Fit]:
        relations = Relations(self._rows, self._rows, is_choice=self._is_choice)
        centred = self._scores - self._centre
        fits = []
        for index, (setting, weight) in enumerate(self._settings):
            half = _inverse_factor(relations.covariance(setting), setting)
            residuals = half @ centred
            amplitude = (
                max(float(np.square(residuals).mean()), 1e-12)
                if amplitudes is None
                else amplitudes[index]
            )
            fits.append(
                _Fit(
                    setting=setting,
                    weight=weight,
                    half=half,
                    residuals=residuals,
                    amplitude=amplitude,
                )
            )
        return fits

    def _moments(self, places: Rows) -> tuple[FloatArray, FloatArray]:
        """Return means and variances by setting, ``[settings, n]``."""
        relations = Relations(self._rows, places, is_choice=self._is_choice)
        means, variances = [], []
        for fit in self._fits:
            seen = fit.half @ relations.covariance(fit.setting)
            means.append(self._centre + seen.T @ fit.residuals)
            before = prior_variance(places, fit.setting)
            left = np.maximum(before - np.square(seen).sum(axis=0), 1e-9)
            variances.append(fit.amplitude * left)
        return np.array(means), np.array(variances)


def prior_variance(places: Rows, setting: Setting) -> FloatArray:
    """Return the diagonal of ``Relations(places, places).covariance(setting)``."""
    slope, wiggle = LEVELS["slope"][setting.slope], LEVELS["wiggle"][setting.wiggle]
    slopes = np.square(_ahead(places.times, LEVELS["power"][setting.power]))
    slopes += np.square(places.decays).sum(axis=1)
    out: FloatArray = COMMON * (1.0 + slopes) + 1.0 + slope * slopes
    return out + COMMON_WIGGLE + wiggle


def _inverse_factor(covariance: FloatArray, setting: Setting) -> FloatArray:
    noisy = covariance + (LEVELS["noise"][setting.noise] + JITTER) * np.eye(len(covariance))
    try:
        out: FloatArray = np.linalg.inv(np.linalg.cholesky(noisy))
    except np.linalg.LinAlgError:
        raise CannotFit from None
    return out


def _best_settings(
    rows: Rows, scores: FloatArray, is_choice: npt.NDArray[np.bool_]
) -> list[tuple[Setting, float]]:
    """Return the settings with the most evidence and their weights.

    The search goes through the hyper-parameters one after the other, and keeps the better level.
    """
    some = np.unique(np.linspace(0, len(scores) - 1, min(NUM_FITTED, len(scores))).astype(int))
    relations = Relations(rows[some], rows[some], is_choice=is_choice)
    centred = scores[some] - scores[some].mean()
    known: dict[Setting, float] = {}  # rounded, so that ties do not depend on rounding

    def evidence(setting: Setting) -> float:
        if setting not in known:
            known[setting] = round(
                _log_evidence(relations.covariance(setting), centred, setting), 6
            )
        return known[setting]

    best = Setting(lengths=(FIRST_LENGTH,) * rows.points.shape[1])
    steps = [(name, 0) for name in ("power", "noise", "shared", "slope", "wiggle")]
    steps += [("lengths", place) for place in range(rows.points.shape[1])]
    for _ in range(NUM_ROUNDS):
        before = best
        for name, place in steps:
            best = max([best, *best.neighbours(name, place)], key=evidence)
        if best == before:
            break
    found = [replace(best, power=power) for power in range(len(LEVELS["power"]))]
    values = np.array([evidence(setting) for setting in found])
    if not np.isfinite(values).any():
        raise CannotFit
    weights = np.exp(TEMPER * (values - values.max()))
    weights /= weights.sum()
    return [(s, float(w)) for s, w in zip(found, weights, strict=True) if w > 1e-3]


def _log_evidence(covariance: FloatArray, centred: FloatArray, setting: Setting) -> float:
    """Return the log evidence at the best amplitude, with a prior on lengths."""
    noisy = covariance + (LEVELS["noise"][setting.noise] + JITTER) * np.eye(len(centred))
    try:
        factor = np.linalg.cholesky(noisy)
    except np.linalg.LinAlgError:
        return -math.inf
    explained = float(np.square(np.linalg.solve(factor, centred)).mean())
    off = sum(abs(level - FIRST_LENGTH) for level in setting.lengths)
    log_determinant = 2.0 * float(np.log(np.diagonal(factor)).sum())
    num = len(centred)
    return -0.5 * (num * math.log(max(explained, 1e-12)) + log_determinant) - 0.5 * off


def _log_upper_tail(z: FloatArray) -> FloatArray:
    """Return the logarithm of the probability of a standard normal value above ``z``.

    NumPy has no error function, and the base package does not need SciPy.
    """
    flat = [math.log(0.5 * math.erfc(min(value, 26.0))) for value in (z / math.sqrt(2)).flat]
    return np.array(flat, float).reshape(z.shape)
