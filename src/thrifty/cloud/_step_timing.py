"""Measured steps of a training on rented machines, and how far they reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from thrifty.core import CloudError

from ._offer import Interval, Offer


Z90 = 1.6448536269514722
"""Standard deviations from the median to the ends of a 90 % interval."""

_LEAST_SD = math.log(1.03) / Z90
"""Least error of a forecast: equal machines differ by this much, however well one is known."""

_NOISE = 0.03
_STRAGGLING = 0.02
_BATCH, _BATCH_OCTAVES, _SAME_BATCH = 0.12, 1.5, 0.05
_PLACEMENT, _PLACEMENT_OCTAVES, _SAME_PLACEMENT = 0.1, 0.7, 0.05
"""Standard deviations of the logarithm of a step over its replay, and how far they reach.

A replay errs alike at neighbouring batch sizes, because the profile of one device has errors of its
own, and at neighbouring numbers of machines and of devices per machine. The figures are rough.
"""

_SAME = 1e-9
"""Octaves apart from which two batches or placements differ."""

_DOUBT = 8.0
"""How many measured steps it takes to doubt these deviations as much as to believe them."""


Factors = tuple[Interval, Interval, Interval]
"""Factors on computation, sums inside a machine, and sums between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Measured step of a training on equal machines.

    Args:
        offer: type of the machines.
        num: number of machines.
        batch: samples per device.
        seconds: seconds of a step; a median of some tens of steps, after the first few.

    Raises:
        CloudError: a number is not positive.

    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.8xlarge",
    ...     accelerator="V100",
    ...     accelerator_count=4,
    ...     price_usd_h=12.24,
    ... )
    >>> print(StepTiming(offer=offer, num=2, batch=32, seconds=0.21))
    32 samples per device in 0.21 s on 2 x p3.8xlarge (4 V100 each)
    """

    offer: Offer
    num: int
    batch: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num < 1 or self.batch < 1:
            raise CloudError(
                f"`num` and `batch` must be at least 1, got num={self.num}, batch={self.batch}"
            )
        if not 0 < self.seconds < math.inf:
            raise CloudError(f"`seconds` must be positive and finite, got {self.seconds}")

    def __str__(self) -> str:
        where = self.offer.spell(self.num)
        return f"{self.batch} samples per device in {self.seconds:g} s on {where}"


@dataclass(frozen=True, slots=True, eq=False)
class ObservedSteps:
    """Posterior of the steps on one type of machine, from some that were measured there.

    The logarithm of a step is its replay's, plus the replay's derivatives times errors of three
    factors (computation, sums inside a machine, sums between machines), plus a Gaussian process
    over the placement and the batch.

    Attributes:
        timings: measured steps.
        prior: the factors' intervals before: compute, inner, network.
        posterior: their intervals now.
        slopes: derivatives of the measured steps' replays by the factors, [timings, 3].
        variances: prior variances of the factors' logarithms, [3].
        inverse: inverse covariance of the measured steps, [timings, timings].
        weights: the inverse times the measured steps' distances from the prior, [timings].
        scale: by how much larger the deviations are than expected.
    """

    timings: tuple[StepTiming, ...]
    prior: Factors
    posterior: Factors
    slopes: np.ndarray
    variances: np.ndarray
    inverse: np.ndarray
    weights: np.ndarray
    scale: float

    @classmethod
    def of(
        cls,
        timings: tuple[StepTiming, ...],
        *,
        prior: Factors,
        slopes: np.ndarray,
        residuals: np.ndarray,
    ) -> ObservedSteps:
        """Return the posterior.

        Args:
            timings: measured steps.
            prior: the factors' intervals before.
            slopes: derivatives of the measured steps' replays by the factors, [timings, 3].
            residuals: log of the measured steps over their prior forecasts, [timings].
        """
        variances = np.array([_deviation(each) for each in prior]) ** 2
        places = np.concatenate([_places_of(each) for each in timings])
        covariance = (slopes * variances) @ slopes.T + _kernel(places, places)
        covariance += _NOISE**2 * np.eye(len(timings))
        inverse = np.linalg.inv(covariance)
        weights = inverse @ residuals
        scale = (_DOUBT + residuals @ weights) / (_DOUBT + len(timings))
        scale = math.sqrt(max(1.0, scale))
        gains = variances[:, None] * slopes.T
        left = variances - np.einsum("ij,jk,ik->i", gains, inverse, gains)
        moved = gains @ weights
        # A factor is no less sure than before, unless it moved farther than its prior allows.
        deviations = np.minimum(
            scale * np.sqrt(np.maximum(left, 0.0)), np.maximum(np.sqrt(variances), np.abs(moved))
        )
        deviations = np.maximum(deviations, _LEAST_SD)
        return cls(
            timings=timings,
            prior=prior,
            posterior=_around([each.median for each in prior] * np.exp(moved), deviations),
            slopes=slopes,
            variances=variances,
            inverse=inverse,
            weights=weights,
            scale=scale,
        )

    def ends(
        self,
        replays_s: np.ndarray,
        slopes: np.ndarray,
        *,
        nodes: np.ndarray,
        per_node: np.ndarray,
        batch: np.ndarray,
        wider: float = 1.0,
    ) -> np.ndarray:
        """Return steps on machines of this type: median, low, high, [3, steps].

        Args:
            replays_s: seconds by the replay with the factors' medians after the measurement.
            slopes: derivatives of their logarithms by the factors' logarithms, [steps, 3].
            nodes: numbers of machines, [steps].
            per_node: devices of each machine, [steps].
            batch: samples per device, [steps].
            wider: factor on the logarithm of the interval.
        """
        here = _places(nodes, per_node, batch)
        there = np.concatenate([_places_of(each) for each in self.timings])
        by_place = _kernel(here, there)
        shared = (slopes * self.variances) @ self.slopes.T + by_place
        known = np.einsum("ij,jk,ik->i", shared, self.inverse, shared)
        prior = (slopes**2) @ self.variances + _variance(here)
        deviations = np.maximum(self.scale * np.sqrt(np.maximum(prior - known, 0.0)), _LEAST_SD)
        medians = replays_s * np.exp(by_place @ self.weights)
        widths = np.exp(wider * Z90 * deviations)
        return np.stack([medians, medians / widths, medians * widths])


def _deviation(interval: Interval) -> float:
    """Return the standard deviation of the logarithm that an interval describes."""
    return max(math.log(interval.high / interval.low) / (2 * Z90), _LEAST_SD)


def _around(medians: np.ndarray, deviations: np.ndarray) -> Factors:
    compute, inner, network = (
        Interval(median=middle, low=middle / width, high=middle * width)
        for middle, width in zip(medians.tolist(), np.exp(Z90 * deviations).tolist(), strict=True)
    )
    return compute, inner, network


def _places_of(timing: StepTiming) -> np.ndarray:
    return _places(
        np.array([timing.num]), np.array([timing.offer.accelerator_count]), np.array([timing.batch])
    )


def _places(nodes: np.ndarray, per_node: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return machines, devices per machine and samples per device, in octaves, [steps, 3]."""
    out: np.ndarray = np.log2(np.stack([nodes, per_node, batch], axis=1).astype(float))
    return out


def _kernel(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the covariance of the replay's errors, [here, there]."""
    apart = here[:, None] - there[None]
    far = apart[..., :2]
    same_batch = np.abs(apart[..., 2]) < _SAME
    same_place = np.abs(far).max(axis=-1) < _SAME
    devices = here[:, :2].sum(axis=1)[:, None] * there[:, :2].sum(axis=1)[None]
    near_batch = np.exp(-0.5 * (apart[..., 2] / _BATCH_OCTAVES) ** 2)
    near_place = np.exp(-0.5 * (far**2).sum(axis=-1) / _PLACEMENT_OCTAVES**2)
    out: np.ndarray = (
        _STRAGGLING**2 * devices
        + _BATCH**2 * near_batch
        + _SAME_BATCH**2 * same_batch
        + _PLACEMENT**2 * near_place
        + _SAME_PLACEMENT**2 * same_place
    )
    return out


def _variance(here: np.ndarray) -> np.ndarray:
    """Return the variance of a measured step around its replay, [here]."""
    fixed = _BATCH**2 + _SAME_BATCH**2 + _PLACEMENT**2 + _SAME_PLACEMENT**2 + _NOISE**2
    out: np.ndarray = fixed + (_STRAGGLING * here[:, :2].sum(axis=1)) ** 2
    return out
