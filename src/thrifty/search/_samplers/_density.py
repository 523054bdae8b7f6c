"""Kernel densities of numbers and options together, in the unit cube."""

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
"""Largest width of a truncated normal.

At this width it is almost uniform between 0 and 1; draws from a wider one would rarely be inside.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Kernel density: the mean of one kernel at each point.

    In each coordinate the kernel is a normal truncated at 0 and 1 or, for options, that of
    Aitchison and Aitken. The latter has ``1 - bandwidth`` at the point's option and divides the
    rest among the others.

    Attributes:
        points: ``[m, d]``, without gaps.
        bandwidths: ``[d]``.
        num_options: ``[d]``, 0 where a coordinate is a number.
        log_peaks: ``[m]``, logarithm of each kernel at its own point.

    >>> density = Density.fit(np.array([[0.2], [0.4]]), np.array([0]), min_bandwidth=1e-3)
    >>> density.log_density(np.array([[0.3], [0.9]])).round(2)
    array([  0.88, -13.91])
    """

    points: FloatArray
    bandwidths: FloatArray
    num_options: IntArray
    log_peaks: FloatArray

    @classmethod
    def fit(cls, points: FloatArray, num_options: IntArray, *, min_bandwidth: float) -> Density:
        """Return the density of points, with normal reference bandwidths (Silverman, 1986)."""
        num, width = points.shape
        bandwidths = np.maximum(
            1.06 * _spread(points, num_options) * num ** (-1.0 / (4 + width)), min_bandwidth
        )
        # At this upper bound all options are equally likely.
        uniform = 1.0 - 1.0 / np.maximum(num_options, 1)
        bandwidths = np.where(num_options > 0, np.minimum(bandwidths, uniform), bandwidths)
        return cls(
            points=points,
            bandwidths=bandwidths,
            num_options=num_options,
            log_peaks=_log_peaks(points, bandwidths, num_options),
        )

    def log_density(self, at: FloatArray) -> FloatArray:
        """Return the logarithm of the density, ``[k]``, at points ``[k, d]``."""
        kernels = np.exp(self._log_likeness(at, self.points) + self.log_peaks)
        logarithm: FloatArray = np.log(np.maximum(kernels.mean(axis=1), _LEAST_DENSITY))
        return logarithm

    def log_distance(self, at: FloatArray, taken: FloatArray) -> FloatArray:
        """Return how far points ``[k, d]`` are from all taken points ``[m, d]``, as ``[k]``.

        The value is 0 for a point that is many bandwidths away from all of them, and lower near
        one. It sums the logarithm of one minus the kernel, where the kernel is 1 at its own point.
        """
        apart = 1.0 - np.exp(self._log_likeness(at, taken))
        distance: FloatArray = np.log(np.maximum(apart, _LEAST_DENSITY)).sum(axis=1)
        return distance

    def _log_likeness(self, at: FloatArray, points: FloatArray) -> FloatArray:
        """Return logarithms of kernels that are 1 at their own point, ``[k, m]``."""
        numbers = self.num_options == 0
        z = (at[:, None, numbers] - points[:, numbers]) / self.bandwidths[numbers]
        likeness: FloatArray = np.einsum("kmd,kmd->km", z, z) * -0.5
        if not numbers.all():
            width, others = self.bandwidths[~numbers], _num_others(self.num_options[~numbers])
            differs = np.abs(at[:, None, ~numbers] - points[:, ~numbers]) * others > 0.5
            # A single option has no other to differ from, but the logarithm must still be defined.
            log_other = np.log(np.maximum(width, _LEAST_DENSITY) / others / (1.0 - width))
            likeness += np.where(differs, log_other, 0.0).sum(axis=2)
        return likeness

    def draw(self, num: int, *, factor: float, rng: np.random.Generator) -> FloatArray:
        """Draw points, ``[num, d]``, from the density with ``factor`` times the bandwidths."""
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
    """Return points with their gaps (NaN) filled from points of ``source``, or at random.

    A gap is filled at random if no point of ``source`` has a value there. As in HpBandSter, one
    donor fills all the gaps of a point that it can.

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
    """Return the number of options besides one, but at least 1, so that it can be a divisor."""
    return np.maximum(num_options - 1, 1)


def _log_peaks(points: FloatArray, bandwidths: FloatArray, num_options: IntArray) -> FloatArray:
    numbers = num_options == 0
    centres, widths = points[:, numbers], bandwidths[numbers]
    inside = cdf((1.0 - centres) / widths) - cdf(-centres / widths)
    peaks = -np.log(inside * widths * math.sqrt(2.0 * math.pi)).sum(axis=1)
    logarithm: FloatArray = peaks + np.log1p(-bandwidths[~numbers]).sum()
    return logarithm


def _spread(points: FloatArray, num_options: IntArray) -> FloatArray:
    """Return standard deviations, ``[d]``.

    The order of options has no meaning, so their value is the root of half the probability that two
    points differ. For two options, this is the standard deviation of their index, which HpBandSter
    uses for any number of options.
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
    """Draw normals around centres in the unit cube, and redraw until they are inside it."""
    widths = np.minimum(widths, _WIDEST)
    drawn = centres + widths * rng.standard_normal(centres.shape)
    while (outside := (drawn < 0.0) | (drawn > 1.0)).any():
        rows, columns = np.nonzero(outside)
        again = centres[rows, columns] + widths[columns] * rng.standard_normal(len(rows))
        drawn[rows, columns] = again
    return drawn
