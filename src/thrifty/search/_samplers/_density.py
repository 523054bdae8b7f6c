"""Kernel densities in the unit cube, of numbers and options together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._normal import cdf


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int_]

_LEAST_DENSITY = 1e-32
_WIDEST = 4.0
"""A normal as wide as this is all but uniform between 0 and 1; draws from a wider one would rarely be inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """The mean of one kernel at each point: in each coordinate a normal cut off at 0 and 1, or Aitchison and Aitken's.

    The latter has ``1 - bandwidth`` at the point's option and shares the rest among the others.

    >>> density = Density.fit(np.array([[0.2], [0.4]]), np.array([0]), min_bandwidth=1e-3)
    >>> density.log_density(np.array([[0.3], [0.9]])).round(2)
    array([  0.88, -13.91])

    Attributes:
        points: ``[m, d]``, without gaps.
        bandwidths: ``[d]``.
        num_options: ``[d]``, 0 where a coordinate is a number.
        log_peaks: ``[m]``, the logarithm of each kernel at its own point.
    """

    points: FloatArray
    bandwidths: FloatArray
    num_options: IntArray
    log_peaks: FloatArray

    @classmethod
    def fit(cls, points: FloatArray, num_options: IntArray, *, min_bandwidth: float) -> Density:
        """The density of points, with bandwidths by the normal reference rule (Silverman, 1986)."""
        num, width = points.shape
        bandwidths = np.maximum(
            1.06 * _spread(points, num_options) * num ** (-1.0 / (4 + width)), min_bandwidth
        )
        # at the upper end all options are equally likely
        uniform = 1.0 - 1.0 / np.maximum(num_options, 1)
        bandwidths = np.where(num_options > 0, np.minimum(bandwidths, uniform), bandwidths)
        return cls(
            points=points,
            bandwidths=bandwidths,
            num_options=num_options,
            log_peaks=_log_peaks(points, bandwidths, num_options),
        )

    def log_density(self, at: FloatArray) -> FloatArray:
        """The logarithm of the density, ``[k]``, at points ``[k, d]``."""
        kernels = np.exp(self._log_likeness(at, self.points) + self.log_peaks)
        logarithm: FloatArray = np.log(np.maximum(kernels.mean(axis=1), _LEAST_DENSITY))
        return logarithm

    def log_distance(self, at: FloatArray, taken: FloatArray) -> FloatArray:
        """0 for points ``[k, d]`` that are many bandwidths away from all that are taken, ``[m, d]``, and less near one, ``[k]``.

        The logarithm of one minus the kernel, where the kernel is 1 at its own point.
        """
        apart = 1.0 - np.exp(self._log_likeness(at, taken))
        distance: FloatArray = np.log(np.maximum(apart, _LEAST_DENSITY)).sum(axis=1)
        return distance

    def _log_likeness(self, at: FloatArray, points: FloatArray) -> FloatArray:
        """Logarithms of kernels that are 1 at their own point, ``[k, m]``."""
        numbers = self.num_options == 0
        z = (at[:, None, numbers] - points[:, numbers]) / self.bandwidths[numbers]
        likeness: FloatArray = np.einsum("kmd,kmd->km", z, z) * -0.5
        if not numbers.all():
            width, others = self.bandwidths[~numbers], _num_others(self.num_options[~numbers])
            differs = np.abs(at[:, None, ~numbers] - points[:, ~numbers]) * others > 0.5
            # an option alone has nothing to differ from; the logarithm must exist all the same
            log_other = np.log(np.maximum(width, _LEAST_DENSITY) / others / (1.0 - width))
            likeness += np.where(differs, log_other, 0.0).sum(axis=2)
        return likeness

    def draw(self, num: int, *, factor: float, rng: np.random.Generator) -> FloatArray:
        """Points from the density with bandwidths that are ``factor`` times as wide, ``[num, d]``."""
        numbers = self.num_options == 0
        drawn = self.points[rng.integers(len(self.points), size=num)]
        drawn[:, numbers] = _truncated_normal(
            drawn[:, numbers], factor * self.bandwidths[numbers], rng=rng
        )
        options = self.num_options[~numbers]
        moves = rng.random((num, len(options))) < factor * self.bandwidths[~numbers]
        anew = rng.integers(options, size=(num, len(options))) / _num_others(options)
        drawn[:, ~numbers] = np.where(moves, anew, drawn[:, ~numbers])
        return drawn


def impute(
    points: FloatArray,
    source: FloatArray,
    num_options: IntArray,
    *,
    rng: np.random.Generator,
) -> FloatArray:
    """Points whose gaps (nan) are filled by what some point of ``source`` has there, or at random if none has.

    As HpBandSter does it: one donor fills all the gaps of a point that it can.

    >>> points = np.array([[0.1, np.nan], [0.2, 0.7]])
    >>> impute(points, points, np.array([0, 0]), rng=np.random.default_rng(0))
    array([[0.1, 0.7],
           [0.2, 0.7]])
    """
    gaps = np.isnan(points)
    if not gaps.any():
        return points
    filled, donors = points.copy(), ~np.isnan(source)
    for row in np.flatnonzero(gaps.any(axis=1)).tolist():
        while (missing := np.flatnonzero(np.isnan(filled[row]))).size:
            first = missing[0]
            able = np.flatnonzero(donors[:, first])
            if able.size:
                filled[row, missing] = source[rng.choice(able), missing]
            elif num_options[first]:
                last = max(int(num_options[first]) - 1, 1)
                filled[row, first] = rng.integers(num_options[first]) / last
            else:
                filled[row, first] = rng.random()
    return filled


def _num_others(num_options: IntArray) -> IntArray:
    """How many options there are besides one; 1 where there is none, to divide by."""
    return np.maximum(num_options - 1, 1)


def _log_peaks(points: FloatArray, bandwidths: FloatArray, num_options: IntArray) -> FloatArray:
    numbers = num_options == 0
    centres, widths = points[:, numbers], bandwidths[numbers]
    inside = cdf((1.0 - centres) / widths) - cdf(-centres / widths)
    peaks = -np.log(inside * widths * math.sqrt(2.0 * math.pi)).sum(axis=1)
    logarithm: FloatArray = peaks + np.log1p(-bandwidths[~numbers]).sum()
    return logarithm


def _spread(points: FloatArray, num_options: IntArray) -> FloatArray:
    """Standard deviations, ``[d]``.

    Of options, whose order means nothing, the root of half the chance that two points differ: for two options that is
    the standard deviation of their index, which HpBandSter takes for any number of them.
    """
    spread: FloatArray = points.std(axis=0)
    for column in np.flatnonzero(num_options).tolist():
        index = np.rint(points[:, column] * (num_options[column] - 1)).astype(int)
        shares = np.bincount(index) / len(index)
        spread[column] = math.sqrt(max(0.5 * (1.0 - float(shares @ shares)), 0.0))
    return spread


def _truncated_normal(
    centres: FloatArray, widths: FloatArray, *, rng: np.random.Generator
) -> FloatArray:
    """Normal draws around centres in the unit cube that are repeated until they are in it too."""
    widths = np.minimum(widths, _WIDEST)
    drawn = centres + widths * rng.standard_normal(centres.shape)
    while (outside := (drawn < 0.0) | (drawn > 1.0)).any():
        rows, columns = np.nonzero(outside)
        again = centres[rows, columns] + widths[columns] * rng.standard_normal(len(rows))
        drawn[rows, columns] = again
    return drawn
