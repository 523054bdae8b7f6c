"""Measures this worker's speed before training starts."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from thrifty.core import Clock, HeteroError
from thrifty.pack import out_of_memory
from thrifty.perf import StepCurve


_REPEATS = 3


def measure_curve(
    step: Callable[[int], None],
    *,
    most: int,
    clock: Clock,
    least: int = 0,
    budget_s: float = 20.0,
) -> StepCurve:
    """Time whole training steps of 1, 2, 4, ... samples, and fit a speed curve.

    Measuring stops at ``most`` samples, where memory ends, or where the next size would exceed
    ``budget_s``. The line through the measured sizes predicts larger batches.

    Args:
        step: Trains one step with the given number of samples, and waits until the device is done.
        most: Largest number of samples to try.
        clock: Clock to measure with.
        least: Minimum number of samples that the worker has to get.
        budget_s: Seconds that measuring may take.

    Raises:
        HeteroError: Not even the smallest size fits into memory.

    >>> from thrifty.testing import VirtualClock
    >>> clock = VirtualClock()
    >>> curve = measure_curve(lambda n: clock.advance(0.1 + 0.01 * n), most=64, clock=clock)
    >>> round(curve.fixed_s, 3), round(curve.sample_s, 3)
    (0.1, 0.01)
    """
    sizes: list[int] = []
    seconds: list[float] = []
    fits: int | None = None
    began = clock.monotonic()
    size = min(max(1, least), most)
    while True:
        try:
            times = [_timed(step, size, clock) for _ in range(_REPEATS + 1)]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if not sizes:
                raise HeteroError(
                    f"a step with {size} sample(s) does not fit into this worker's memory; a "
                    "smaller model would"
                ) from error
            fits = sizes[-1]
            break
        sizes.append(size)
        seconds.append(median(times[1:]))  # the first one warms up
        spent = clock.monotonic() - began
        if size >= most or spent + 2 * (_REPEATS + 1) * seconds[-1] > budget_s:
            break
        size = min(2 * size, most)
    return StepCurve.fit(sizes, seconds, most=fits, least=least)


def _timed(step: Callable[[int], None], size: int, clock: Clock) -> float:
    began = clock.monotonic()
    step(size)
    return max(clock.monotonic() - began, 1e-9)
