"""How fast this worker is, before it starts."""

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
    """Times whole training steps of 1, 2, 4, ... samples.

    It ends at ``most`` samples, where memory ends, or where the next size would take it beyond ``budget_s``; larger batches are foreseen by the line through the others.

    Args:
        step: trains one step with so many samples, and waits until the device is done.
        most: samples that are worth trying.
        clock: to read.
        least: samples that the worker has to be given.
        budget_s: seconds that measuring may take.

    Raises:
        HeteroError: not even one sample fits into memory.

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
                    f"a step with {size} sample(s) does not fit into this worker's memory; a smaller model would"
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
