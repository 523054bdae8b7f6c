"""Uneven splits of a batch over workers."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from thrifty.core import UsageError

from .profiles import Power, StepCurve


_ENERGY_CANDIDATES = 200
"""Number of step times tried in the search for the one with the least energy."""


class SplitForecast(NamedTuple):
    """Estimated cost of a split.

    Attributes:
        step_s: Seconds until the last worker is done.
        joules: Energy of all workers, waiting and training; None if no power is declared.
    """

    step_s: float
    joules: float | None


def split_batch(curves: Sequence[StepCurve], batch: int) -> tuple[int, ...]:
    """Return the split of ``batch`` samples with the shortest step.

    All workers end together where sizes allow it: ``b_i = (t - fixed_i) / sample_i`` (Stannis'
    equal step time, for any number of engines). Sizes are whole, respect each worker's
    ``min_samples`` and ``max_samples``, and sum to ``batch``. No other split into whole numbers
    ends sooner. A worker that would make the step slower gets no samples.

    Args:
        curves: Curve of each worker.
        batch: Samples of one step, over all workers.

    Returns:
        Samples of each worker.

    Raises:
        UsageError: There are no workers, or their bounds do not allow ``batch`` samples.

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
        curves: Curve of each worker.
        powers: Power of each worker.
        batch: Samples of one step.

    Raises:
        UsageError: As in ``split_batch``, or the numbers of powers and curves differ.

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
        sizes = [curve.min_samples for curve in curves]
        left = batch - sum(sizes)
        for worker in order:
            more = min(left, curves[worker].capacity(limit, batch) - sizes[worker])
            sizes[worker] += more
            left -= more
        if not left:  # rounding can put a limit below the quickest step, which leaves samples over
            tries.append(tuple(sizes))
    return min(tries, key=lambda sizes: forecast_split(curves, sizes, powers=powers)[::-1])


def forecast_split(
    curves: Sequence[StepCurve], split: Sequence[int], *, powers: Sequence[Power] | None = None
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
        raise UsageError(f"`batch` must be at least 1, got {batch}")
    min_samples = sum(curve.min_samples for curve in curves)
    max_samples = sum(curve.capacity(math.inf, batch) for curve in curves)
    if not min_samples <= batch <= max_samples:
        raise UsageError(
            f"a global batch of {batch} samples does not fit these {len(curves)} workers: "
            f"they have to be given {min_samples} at least and hold {max_samples} at most; "
            "change the global batch, or the workers' bounds"
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
        if size > curve.min_samples
    ]
    heapq.heapify(last)
    for _ in range(sum(sizes) - batch):
        _, worker = heapq.heappop(last)
        sizes[worker] -= 1
        if sizes[worker] > curves[worker].min_samples:
            heapq.heappush(last, (-curves[worker].seconds(sizes[worker]), worker))
    return tuple(sizes)


Split = Callable[[Sequence[StepCurve], int], tuple[int, ...]]
"""Function from the workers' present curves and a global batch to samples of each worker."""

Cost = Callable[[Sequence[StepCurve], Sequence[int]], float]
"""Function from the workers' present curves and a split to the cost of a step."""


def step_seconds(curves: Sequence[StepCurve], split: Sequence[int]) -> float:
    """Return the default cost of a split: the seconds of the step.

    >>> step_seconds([StepCurve(sample_s=1.0), StepCurve(sample_s=3.0)], (6, 2))
    6.0
    """
    return forecast_split(curves, split).step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerOptions:
    """Thresholds for changing the split when workers change their speed.

    The defaults come from the step times of four real jobs. In calm jobs, it never happens that
    five steps in a row each take 1.2 times the worker's own trailing median.

    Args:
        slower: A step is unusual if its time is above this multiple of the usual time, or below the
            usual time divided by it.
        patience: Number of unusual steps in a row that count as a change of speed.
        correction: Used instead of ``patience``, if smaller, just after the split has followed a
            change of speed. The first guess may be wrong, and the first two steps are often slow
            because they allocate memory.
        window: Number of steps whose median is the usual time.
        gain: Share of the step's time that a new split must save.

    Raises:
        UsageError: A number is out of range.

    >>> BalancerOptions(patience=3).patience
    3
    """

    slower: float = 1.2
    patience: int = 5
    correction: int = 3
    window: int = 50
    gain: float = 0.03

    def __post_init__(self) -> None:
        if not self.slower > 1:
            raise UsageError(f"`slower` must be above 1, got {self.slower}")
        if not 1 <= self.patience <= self.window:
            raise UsageError(
                f"1 <= patience <= window, not patience={self.patience}, window={self.window}"
            )
        if self.correction < 1:
            raise UsageError(f"`correction` must be at least 1, got {self.correction}")
        if not 0 <= self.gain < 1:
            raise UsageError(f"`gain` must be in [0, 1), got {self.gain}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChange:
    """A new split, and its reason.

    Attributes:
        reason: "settled" (the first steps differ from the measured curves), "slower" or "faster" (a
            worker's speed changed), or "drift".
        workers: Workers whose speed changed.
        before: Split until now.
        after: Split from now on.
        step_s: Estimated seconds of a step with each of these splits.
    """

    reason: str
    workers: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    step_s: tuple[float, float]


class Balancer:
    """Keeps a split in line with the workers' measured speed.

    A worker's *slowness* is the ratio of its present step time to its measured curve. Each step is
    compared with the worker's own trailing median of slowness, so a change of split does not change
    what is usual.

    After ``patience`` unusual steps in a row, the worker's slowness is estimated anew. If the new
    value is close to the one before the last change (a load has gone, or is back), the earlier
    value is restored. The first steps and, once per window, slow drift update the slowness of all
    workers.

    The split changes only if that saves ``gain`` of the step: HyperTune's threshold and consecutive
    steps, with hysteresis. There is no clock and no randomness, so equal times give equal splits on
    every worker.

    Args:
        curves: Measured curve of each worker.
        batch: Samples of one step, over all workers.
        options: Thresholds for a change.
        split: Function from curves and a batch to a split; default: ``split_batch``.
        cost: Cost of a step, of which a new split must save ``gain``; default: its seconds.

    Raises:
        UsageError: The workers cannot hold the batch.

    >>> balancer = Balancer([StepCurve(sample_s=1.0)] * 2, batch=8)
    >>> balancer.split
    (4, 4)
    >>> changes = [balancer.observe([4.0, 12.0]) for _ in range(5)]
    >>> changes[-1].after, balancer.split
    ((6, 2), (6, 2))
    """

    def __init__(
        self,
        curves: Sequence[StepCurve],
        *,
        batch: int,
        options: BalancerOptions | None = None,
        split: Split = split_batch,
        cost: Cost = step_seconds,
    ) -> None:
        self._measured = tuple(curves)
        self._batch = batch
        self._options = options or BalancerOptions()
        self._split_for = split
        self._cost = cost
        self._slowness = [1.0] * len(self._measured)
        self._before = [1.0] * len(self._measured)
        self._usual: list[deque[float]] = [self._window() for _ in self._measured]
        self._latest: list[deque[float]] = [self._window() for _ in self._measured]
        self._unusual: list[list[float]] = [[] for _ in self._measured]
        self._steps = 0
        self._correct_until = 0
        self.split = split(self._measured, batch)

    @property
    def curves(self) -> tuple[StepCurve, ...]:
        """The workers' curves at their present speed."""
        return tuple(
            curve.scaled(slowness)
            for curve, slowness in zip(self._measured, self._slowness, strict=True)
        )

    def observe(
        self, seconds: Sequence[float], *, sizes: Sequence[int] | None = None
    ) -> SplitChange | None:
        """Record the times of a step.

        Args:
            seconds: Working time of each worker.
            sizes: Samples of each worker, if that was not the present split.

        Returns:
            The change that takes effect with the next step; None: no change.
        """
        self._steps += 1
        changed: dict[str, list[int]] = {"slower": [], "faster": []}
        for worker, (time_s, size) in enumerate(
            zip(seconds, self.split if sizes is None else sizes, strict=True)
        ):
            if not size:
                continue
            if how := self._take(worker, time_s / self._measured[worker].seconds(size)):
                changed[how].append(worker)
        if changed["slower"] or changed["faster"]:
            reason = "slower" if changed["slower"] else "faster"
            return self._change(reason, changed["slower"] + changed["faster"])
        if self._steps == self._options.patience or not self._steps % self._options.window:
            reason = "settled" if self._steps == self._options.patience else "drift"
            return self._change(reason, self._follow())
        return None

    def probe(self, worker: int, seconds: float, samples: int) -> SplitChange | None:
        """Record a probe of a worker that has no share of the batch.

        The worker has trained ``samples`` samples only to measure its present speed; ``samples`` is
        positive.
        """
        ratio = seconds / self._measured[worker].seconds(samples)
        how = self._take(worker, ratio)
        return self._change(how, [worker]) if how else None

    def _take(self, worker: int, ratio: float) -> str | None:
        """Record one step of one worker; return how its speed changed.

        A time that is not positive and finite is ignored.
        """
        if not 0 < ratio < math.inf:
            return None
        self._latest[worker].append(ratio)
        usual, unusual = self._usual[worker], self._unusual[worker]
        patience = self._options.patience
        if self._steps < self._correct_until:
            # A curve predicts steps of another size only roughly.
            patience = min(patience, self._options.correction)
        if len(usual) < patience:
            usual.append(ratio)
            return None
        normal = median(usual)
        how = (
            "slower"
            if ratio > self._options.slower * normal
            else "faster"
            if ratio < normal / self._options.slower
            else None
        )
        if how is None or (unusual and (unusual[-1] > normal) != (ratio > normal)):
            unusual.clear()
        if how is None:
            usual.append(ratio)
            return None
        unusual.append(ratio)
        if len(unusual) < patience:
            return None
        self._slowness[worker] = self._recalled(worker, median(unusual))
        self._usual[worker] = self._window(unusual)
        self._latest[worker] = self._window(unusual)
        unusual.clear()
        return how

    def _recalled(self, worker: int, measured: float) -> float:
        """Return the slowness from before the last change if it is back, else the measured one.

        The earlier value is known better than from a few steps of another size.
        """
        before, now = self._before[worker], self._slowness[worker]
        if self._steps >= self._correct_until:
            self._before[worker] = now
        is_back = 1 / self._options.slower < measured / before < self._options.slower
        return before if is_back else measured

    def _follow(self) -> list[int]:
        """Set every worker's slowness to that of its latest steps; return all workers.

        Unusual steps count, too: a worker that is slow every other step is a slow worker.
        """
        for worker, latest in enumerate(self._latest):
            if latest:
                self._slowness[worker] = median(latest)
        return list(range(len(self._latest)))

    def _change(self, reason: str, workers: list[int]) -> SplitChange | None:
        after = self._split_for(self.curves, self._batch)
        now, then = self._cost(self.curves, self.split), self._cost(self.curves, after)
        if after == self.split or then > now * (1 - self._options.gain):
            return None
        change = SplitChange(
            reason=reason,
            workers=tuple(workers),
            before=self.split,
            after=after,
            step_s=(step_seconds(self.curves, self.split), step_seconds(self.curves, after)),
        )
        self.split = after
        if reason in {"slower", "faster"}:
            self._correct_until = self._steps + 2 * self._options.patience + 1
        return change

    def _window(self, ratios: Sequence[float] = ()) -> deque[float]:
        return deque(ratios, maxlen=self._options.window)
