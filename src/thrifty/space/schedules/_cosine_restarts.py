"""Cosine decay with warm restarts."""

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
    """Repeated half cosines from ``value`` to ``floor``.

    The first takes ``period`` epochs, and each later one is ``growth`` times as long as the one
    before.

    >>> CosineRestarts(1.0, period=2).values(0, 4, epochs=4).round(4).tolist()
    [1.0, 0.5, 1.0, 0.5]

    References:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017.
    """

    value: Number
    period: Number = field(kw_only=True)
    growth: Number = field(default=1.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one arc for each period."""
        arcs, start, length = [], 0.0, float(self.period)
        while start < epochs:
            stop = start + length
            arc = cosine_arc(self.value, self.floor, start, stop)
            arcs.append(Segment(start, min(stop, epochs), arc))
            start, length = stop, length * self.growth
        return sampled(tuple(arcs), self.sample, length=epochs)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return 0.0

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, period=self.period)
        check_rate(self, self.sample)
        if self.growth < 1.0:
            raise ScheduleError(f"{self!r}: growth must be at least 1, not {self.growth!r}")
