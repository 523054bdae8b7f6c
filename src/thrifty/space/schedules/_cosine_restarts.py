"""Half cosines, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, cosine_arc
from thrifty.space.schedules._base import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    check_rate,
    sampled,
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CosineRestarts(Schedule):
    """A cosine of ``period`` epochs to ``floor``, again and again, each ``growth`` times as long.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017.

    >>> CosineRestarts(1.0, period=2).values(0, 4, epochs=4).round(4).tolist()
    [1.0, 0.5, 1.0, 0.5]
    """

    value: Number
    period: Number = field(kw_only=True)
    growth: Number = field(default=1.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """One arc for each period."""
        arcs, start, length = [], 0.0, float(self.period)
        while start < epochs:
            stop = start + length
            arc = cosine_arc(self.value, self.floor, start, stop)
            arcs.append(Segment(start, min(stop, epochs), arc))
            start, length = stop, length * self.growth
        return sampled(tuple(arcs), self.sample, length=epochs)

    def span(self) -> float:
        """The fewest epochs a run needs."""
        return 0.0

    def validate(self) -> None:
        """Raises ScheduleError for fields that make no sense."""
        check_positive(self, period=self.period)
        check_rate(self, self.sample)
        if self.growth < 1.0:
            raise ScheduleError(f"{self!r}: growth must be at least 1, not {self.growth!r}")
