"""How often checks run, and how long the steps that they take alone."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median


SHARE = 0.01
"""The share of training time that checks may take, besides those that are never skipped."""


@dataclass(slots=True, kw_only=True)
class CheckBudget:
    """Seconds of checks and of training.

    Attributes:
        share: The share of training time up to which optional checks may bring the total.
        trained_s: Seconds of training in blocks.
        spent_s: Seconds of all checks.
        num_checks: Checks so far.
    """

    share: float = SHARE
    trained_s: float = 0.0
    spent_s: float = 0.0
    num_checks: int = 0

    def spend(self, seconds: float) -> None:
        """Add the cost of a check."""
        self.spent_s += seconds
        self.num_checks += 1

    def allows(self, seconds: float) -> bool:
        """Return whether a check of this cost fits into the share of training time.

        >>> budget = CheckBudget(trained_s=10.0)
        >>> budget.spend(0.02)
        >>> budget.allows(0.02), budget.allows(0.1)
        (True, False)
        """
        return self.spent_s + seconds <= self.share * self.trained_s


MIN_SAMPLES = 3
"""The fewest steps from which the time of a step is estimated."""
MAX_SAMPLES = 200
"""How many of the latest times are kept."""
TAIL = 0.025
"""The probability that the median lies beyond either end of its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneTime:
    """The seconds that something takes alone, with the ends of its confidence interval."""

    seconds: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> AloneTime:
    """Return the median of some times with a distribution-free 95 % confidence interval.

    Its ends are order statistics; with fewer than six samples they are the minimum and the maximum.

    >>> median_interval([3.0, 1.0, 2.0])
    AloneTime(seconds=2.0, low=1.0, high=3.0)
    >>> median_interval([float(k) for k in range(20)])
    AloneTime(seconds=9.5, low=5.0, high=14.0)
    """
    ordered, first = sorted(samples), _first_inside(len(samples))
    return AloneTime(seconds=median(ordered), low=ordered[first], high=ordered[-1 - first])


@cache
def _first_inside(num: int) -> int:
    """Return the index of the interval's low end among ``num`` ordered samples."""
    below, outside = 0.5**num, 0
    while below <= TAIL and 2 * (outside + 1) < num:
        outside += 1
        below += math.comb(num, outside) * 0.5**num
    return max(outside - 1, 0)


class SoloTimes:
    """Times of steps and evaluations alone, by what they depend on.

    The first step of each kind is dropped, because libraries and memory are prepared in it. The
    first evaluation counts only while there is no other.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[Hashable, deque[float]] = defaultdict(_samples)
        self._evaluations: defaultdict[Hashable, deque[float]] = defaultdict(_samples)
        self._first: dict[Hashable, float] = {}
        """The first evaluation of each kind, used until there is another one."""
        self._warm: set[tuple[str, Hashable]] = set()

    def note_step(self, key: Hashable, seconds: float) -> None:
        """Record the time of a step alone."""
        if self._is_warm("step", key):
            self._steps[key].append(seconds)

    def note_evaluation(self, key: Hashable, seconds: float) -> None:
        """Record the time of an evaluation alone."""
        if not self._is_warm("evaluation", key):
            self._first[key] = seconds
        else:
            self._evaluations[key].append(seconds)

    def evaluation_s(self, key: Hashable) -> float | None:
        """Return the median time of an evaluation; None if there was none."""
        found = self._all_evaluations(key)
        return median(found) if found else None

    def epoch(self, key: Hashable, *, num_steps: int) -> AloneTime | None:
        """Return how long an epoch takes alone; None while too little was measured."""
        steps, evaluations = self._steps.get(key, ()), self._all_evaluations(key)
        if len(steps) < MIN_SAMPLES or not evaluations:
            return None
        step, evaluation = median_interval(steps), median_interval(evaluations)
        return AloneTime(
            seconds=num_steps * step.seconds + evaluation.seconds,
            low=num_steps * step.low + evaluation.low,
            high=num_steps * step.high + evaluation.high,
        )

    def _all_evaluations(self, key: Hashable) -> Sequence[float]:
        first = [self._first[key]] if key in self._first else []
        return self._evaluations.get(key) or first

    def _is_warm(self, what: str, key: Hashable) -> bool:
        """Return whether this is not the first call for this kind and key."""
        is_warm = (what, key) in self._warm
        self._warm.add((what, key))
        return is_warm


def _samples() -> deque[float]:
    return deque(maxlen=MAX_SAMPLES)
