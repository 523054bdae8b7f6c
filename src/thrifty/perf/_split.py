"""Split of a global batch among workers so that none waits for long."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thrifty.core import UsageError

from ._power import Power
from ._step_curve import StepCurve


_ENERGY_CANDIDATES = 200
"""Number of step times tried in the search for the one with the least energy."""


class SplitForecast(NamedTuple):
    """Estimated cost of a split.

    Attributes:
        step_s: seconds until the last worker is done.
        joules: energy of all workers, waiting and training; None if no power is declared.
    """

    step_s: float
    joules: float | None


def split_batch(curves: Sequence[StepCurve], batch: int) -> tuple[int, ...]:
    """Return the split of ``batch`` samples with the shortest step.

    All workers end together where sizes allow it: ``b_i = (t - fixed_i) / sample_i`` (Stannis'
    equal step time, for any number of engines). Sizes are whole, respect each worker's ``least``
    and ``most``, and sum to ``batch``. No other split into whole numbers ends sooner. A worker that
    would make the step slower gets no samples.

    Args:
        curves: curve of each worker.
        batch: samples of one step, over all workers.

    Returns:
        Samples of each worker.

    Raises:
        UsageError: there are no workers, or their bounds do not allow ``batch`` samples.

    >>> fast, slow = StepCurve(sample_s=1.0), StepCurve(sample_s=3.0)
    >>> split_batch([fast, slow], 8)
    (6, 2)
    >>> split_batch([fast, StepCurve(sample_s=1.0, fixed_s=20.0)], 8)
    (8, 0)
    """
    _check(curves, batch)
    quickest = _least_time(curves, batch)
    return _trimmed(curves, [curve.capacity(quickest, batch) for curve in curves], batch)


def split_for_energy(
    curves: Sequence[StepCurve], powers: Sequence[Power], batch: int
) -> tuple[int, ...]:
    """Return a split that needs little energy for a step, found by a greedy search.

    For each of many step times, from the shortest possible one upwards, workers are filled in the
    order of their joules per additional sample; the best of these splits is kept. Waiting costs
    energy, too, so slow and economical workers alone are seldom best. If steps have no fixed cost,
    the result is exact up to the grid of step times.

    Args:
        curves: curve of each worker.
        powers: power of each worker.
        batch: samples of one step.

    Raises:
        UsageError: as in ``split_batch``, or the numbers of powers and curves differ.

    >>> host, device = StepCurve(sample_s=0.01), StepCurve(sample_s=0.02)
    >>> watts = [Power(idle_w=0.0, busy_w=100.0), Power(idle_w=0.0, busy_w=5.0)]
    >>> split_for_energy([host, device], watts, 30)
    (0, 30)
    """
    _check(curves, batch)
    if len(powers) != len(curves):
        raise UsageError(f"{len(curves)} workers have {len(powers)} powers; give one for each")
    quickest = _least_time(curves, batch)
    # A longer step than this changes nothing.
    longest = max(curve.seconds(curve.capacity(math.inf, batch)) for curve in curves)
    per_sample = [
        (power.busy_w - power.idle_w) * curve.sample_s
        for curve, power in zip(curves, powers, strict=True)
    ]
    order = sorted(range(len(curves)), key=lambda worker: per_sample[worker])
    limits = np.geomspace(quickest, longest, _ENERGY_CANDIDATES)
    tries = [split_batch(curves, batch)]
    for limit in [*limits.tolist(), math.inf]:
        sizes = [curve.least for curve in curves]
        left = batch - sum(sizes)
        for worker in order:
            more = min(left, curves[worker].capacity(limit, batch) - sizes[worker])
            sizes[worker] += more
            left -= more
        if (
            not left
        ):  # rounding can put a limit below the quickest step, which leaves samples over
            tries.append(tuple(sizes))
    return min(tries, key=lambda sizes: forecast_split(curves, sizes, powers=powers)[::-1])


def forecast_split(
    curves: Sequence[StepCurve],
    split: Sequence[int],
    *,
    powers: Sequence[Power] | None = None,
) -> SplitForecast:
    """Return the time and energy of a step with this split, without the exchange of gradients.

    >>> forecast_split([StepCurve(sample_s=1.0), StepCurve(sample_s=3.0)], (6, 2)).step_s
    6.0
    """
    busy = [curve.seconds(size) for curve, size in zip(curves, split, strict=True)]
    whole = max(busy)
    if powers is None:
        return SplitForecast(whole, None)
    joules = [
        power.joules(busy_s=seconds, whole_s=whole)
        for power, seconds in zip(powers, busy, strict=True)
    ]
    return SplitForecast(whole, sum(joules))


def _check(curves: Sequence[StepCurve], batch: int) -> None:
    if not curves:
        raise UsageError("there is no worker to give a batch to")
    if batch < 1:
        raise UsageError(f"a global batch has at least one sample, not {batch}")
    least = sum(curve.least for curve in curves)
    most = sum(curve.capacity(math.inf, batch) for curve in curves)
    if not least <= batch <= most:
        raise UsageError(
            f"a global batch of {batch} samples does not fit these {len(curves)} workers: "
            f"they have to be given {least} at least and hold {most} at most; change the "
            "global batch, or the workers' bounds"
        )


def _least_time(curves: Sequence[StepCurve], batch: int) -> float:
    """Return the shortest step time at which the workers' capacities suffice."""
    low, high = 0.0, max(curve.seconds(curve.capacity(math.inf, batch)) for curve in curves)
    for _ in range(80):
        middle = (low + high) / 2
        if sum(curve.capacity(middle, batch) for curve in curves) >= batch:
            high = middle
        else:
            low = middle
    return high


def _trimmed(curves: Sequence[StepCurve], sizes: list[int], batch: int) -> tuple[int, ...]:
    """Remove surplus samples from the workers that end last."""
    last = [
        (-curve.seconds(size), worker)
        for worker, (curve, size) in enumerate(zip(curves, sizes, strict=True))
        if size > curve.least
    ]
    heapq.heapify(last)
    for _ in range(sum(sizes) - batch):
        _, worker = heapq.heappop(last)
        sizes[worker] -= 1
        if sizes[worker] > curves[worker].least:
            heapq.heappush(last, (-curves[worker].seconds(sizes[worker]), worker))
    return tuple(sizes)
