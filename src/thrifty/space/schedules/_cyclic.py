"""A triangle wave."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thrifty.space._pieces import Segment, ramp
from thrifty.space.schedules._base import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    check_rate,
    sampled,
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cyclic(Schedule):
    """A triangle wave from ``low`` to ``high`` and back every ``period`` epochs.

    >>> Cyclic(0.0, 1.0, period=4).values(0, 5, epochs=8).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0]

    References:
        Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017 (policy
        "triangular").
    """

    low: Number
    high: Number
    period: Number = field(kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return two ramps for each period."""
        half, arcs = self.period / 2.0, []
        for index in range(math.ceil(epochs / half)):
            start, stop = index * half, (index + 1) * half
            first, last = (self.low, self.high) if index % 2 == 0 else (self.high, self.low)
            arcs.append(Segment(start, min(stop, epochs), ramp(first, last, start, stop)))
        return sampled(tuple(arcs), self.sample, length=epochs)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return 0.0

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, period=self.period)
        check_rate(self, self.sample)
