"""How a global batch is split so that nobody waits."""

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
"""Step times that are tried for the one that needs least energy."""


class SplitForecast(NamedTuple):
    """What a split costs.

    Attributes:
        step_s: seconds until the last worker is done.
        joules: of all workers, waiting and working; None where no power is declared.
    """

    step_s: float
    joules: float | None


def split_batch(curves: Sequence[StepCurve], batch: int) -> tuple[int, ...]:
    """The split of ``batch`` samples whose slowest worker ends first.

    All end together where sizes allow it: ``b_i = (t - fixed_i) / sample_i`` (Stannis' equal step time, for any number of engines). Sizes are whole, keep to each
    worker's ``least`` and ``most``, and sum to ``batch``; no other split of whole numbers ends sooner. A worker that would make the step slower gets nothing.

    Args:
        curves: of each worker.
        batch: samples of one step, of all workers together.

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
    """A split that needs few joules for a step: the best of a greedy search.

    For each of many step times, from the shortest possible on, workers are filled in the order of their joules for one more sample; the best of these splits is kept. Waiting
    costs energy, too, so slow and thrifty workers alone are seldom best. Exact where steps have no fixed cost, up to the step
    times that are tried.

    Args:
        curves: of each worker.
        powers: of each worker.
        batch: samples of one step.

    Raises:
        UsageError: as ``split_batch``; or there are not as many powers as curves.

    >>> host, device = StepCurve(sample_s=0.01), StepCurve(sample_s=0.02)
    >>> watts = [Power(idle_w=0.0, busy_w=100.0), Power(idle_w=0.0, busy_w=5.0)]
    >>> split_for_energy([host, device], watts, 30)
    (0, 30)
    """
    _check(curves, batch)
    if len(powers) != len(curves):
        raise UsageError(f"{len(curves)} workers have {len(powers)} powers; give one for each")
    quickest = _least_time(curves, batch)
    # With more time than this for a step nothing changes.
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
        if not left:  # a limit that rounding has put below the quickest step leaves some
            tries.append(tuple(sizes))
    return min(tries, key=lambda sizes: forecast_split(curves, sizes, powers=powers)[::-1])


def forecast_split(
    curves: Sequence[StepCurve],
    split: Sequence[int],
    *,
    powers: Sequence[Power] | None = None,
) -> SplitForecast:
    """Time and energy of a step with this split; what exchanging gradients costs is not in it.

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
            f"a global batch of {batch} samples does not fit these {len(curves)} workers: they have to be given {least} at least and hold {most} at most; change the global batch, or the workers' bounds"
        )


def _least_time(curves: Sequence[StepCurve], batch: int) -> float:
    """The shortest step time at which the workers' capacities suffice."""
    low, high = 0.0, max(curve.seconds(curve.capacity(math.inf, batch)) for curve in curves)
    for _ in range(80):
        middle = (low + high) / 2
        if sum(curve.capacity(middle, batch) for curve in curves) >= batch:
            high = middle
        else:
            low = middle
    return high


def _trimmed(curves: Sequence[StepCurve], sizes: list[int], batch: int) -> tuple[int, ...]:
    """Takes what is too much from those who end last."""
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
