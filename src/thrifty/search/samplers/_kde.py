"""A sampler that learns kernel densities, as in BOHB and TPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thrifty.search._history import History
from thrifty.search._scores import Observations, coordinates_of, observe, points_of
from thrifty.space import Coordinates, Space

from ._base_sampler import Picker, Sampler, check_counts, check_shares, option_error


FloatArray = npt.NDArray[np.float64]

_ROOT_2 = math.sqrt(2.0)
_ROOT_2_PI = math.sqrt(2.0 * math.pi)
_STANDARD = NormalDist()


def cdf(z: FloatArray) -> FloatArray:
    """Return the standard normal distribution function.

    >>> cdf(np.array([-1.96, 0.0])).round(3)
    array([0.025, 0.5  ])
    """
    erf = math.erf
    values = np.array([erf(x) for x in (z / _ROOT_2).ravel().tolist()], float)
    return 0.5 * (1.0 + values.reshape(z.shape))


def pdf(z: FloatArray) -> FloatArray:
    """Return the standard normal density.

    >>> pdf(np.array([0.0])).round(3)
    array([0.399])
    """
    density: FloatArray = np.exp(-0.5 * z * z) / _ROOT_2_PI
    return density


def normal_scores(scores: FloatArray) -> FloatArray:
    """Return the normal score of each score: its expected place among draws of a standard normal.

    Equal scores get their mean rank. Only the order counts, so a loss of a billion is no further
    away than the next worse one.

    >>> normal_scores(np.array([0.9, -1e9, 0.8])).round(3)
    array([ 0.967, -0.967,  0.   ])
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - 0.5 * counts  # lower scores, plus half of the equal ones
    quantiles = [_STANDARD.inv_cdf(rank / len(scores)) for rank in ranks.tolist()]
    return np.array(quantiles, float)[inverse]


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
    points: FloatArray, source: FloatArray, num_options: IntArray, *, rng: np.random.Generator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KDESampler(Sampler):
    """Proposes what is likely among good trials and unlikely among bad ones; never exhausted.

    Falkner, Klein and Hutter, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale",
    ICML 2018, with the constants of the authors' HpBandSter. At the largest epoch that enough
    trials have reached, the best ``top_share`` of them and the others each get a kernel density. Of
    ``num_candidates`` candidates drawn near good trials, the one with the highest ratio of
    densities is taken. A share ``random_share`` of the draws is random, and all draws are until
    there is enough to learn from. The ratio is lowered near trials in training and near recent
    draws (as in local penalization, González et al., AISTATS 2016), so that a batch spreads.

    Args:
        top_share: Share of the trials that are good.
        num_candidates: Number of candidates that are compared for each draw.
        random_share: Share of the draws that are random.
        bandwidth_factor: Ratio of the spread of the candidates to the density of the good trials.
        min_bandwidth: Least width of a kernel in the unit cube. With the 0.001 of BOHB's authors,
            good trials may contract around one that is not the best; 0.1 did better on most smooth
            functions tried.
        min_points: Number of good and of bad trials that it needs (default: one more than there are
            coordinates).
        share: Part of the best candidate's lead over the median that may be given up to share
            training.

    Raises:
        AlgorithmError: An option is out of range.

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> KDESampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]
    """

    adapts: ClassVar[bool] = True
    top_share: float = 0.15
    num_candidates: int = 64
    random_share: float = 1 / 3
    bandwidth_factor: float = 3.0
    min_bandwidth: float = 0.1
    min_points: int | None = None
    share: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, num_candidates=self.num_candidates)
        check_shares(
            self, top_share=self.top_share, random_share=self.random_share, share=self.share
        )
        if self.min_points is not None:
            check_counts(self, min_points=self.min_points)
        for name in ("bandwidth_factor", "min_bandwidth"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value > 0):
                raise option_error(self, f"{name} must be a positive number", **{name: value})

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        coordinates = coordinates_of(space)
        least = self.min_points or len(coordinates) + 1
        picker = Picker(history, share=self.share)
        is_random = rng.random(num) < self.random_share
        if is_random.all():
            return [picker.draw(space, rng) for _ in range(num)]
        seen = observe(history, coordinates, min_points=2 * least)
        if len(seen) < 2 * least:
            return [picker.draw(space, rng) for _ in range(num)]
        good, bad = self._densities(seen, coordinates.num_options, least=least, rng=rng)
        taken = impute(points_of(seen.pending, coordinates), good.points, good.num_options, rng=rng)
        configs = []
        for at_random in is_random.tolist():
            picked = None
            if not at_random:
                points = good.draw(self.num_candidates, factor=self.bandwidth_factor, rng=rng)
                lead = good.log_density(points) - bad.log_density(points)
                # Adding these points to the bad trials would hardly matter: bad kernels are wide
                # and many.
                lead += good.log_distance(points, taken)
                picked = picker.pick(lead, _configs(coordinates, points))
            config = picker.draw(space, rng) if picked is None else picked[1]
            point = points_of([config], coordinates)
            point = impute(point, good.points, good.num_options, rng=rng)
            taken = np.concatenate([taken, point])
            configs.append(config)
        return configs

    def _densities(
        self, seen: Observations, num_options: IntArray, *, least: int, rng: np.random.Generator
    ) -> tuple[Density, Density]:
        order = np.argsort(-seen.scores, kind="stable")
        num_good = max(least, int(self.top_share * len(seen)))
        num_good = min(num_good, len(seen) - least)
        good, bad = seen.points[order[:num_good]], seen.points[order[num_good:]]
        good, bad = (impute(points, points, num_options, rng=rng) for points in (good, bad))
        return (
            Density.fit(good, num_options, min_bandwidth=self.min_bandwidth),
            Density.fit(bad, num_options, min_bandwidth=self.min_bandwidth),
        )


def _configs(coordinates: Coordinates, points: FloatArray) -> Callable[[int], dict[str, Any]]:
    return lambda index: coordinates.from_unit(points[index])
