"""Linear warm-up before another schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from thrifty.space._pieces import Segment, ramp, values_at
from thrifty.space.schedules._base import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    check_rate,
    sampled,
    shift,
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Warmup(Schedule):
    """A linear warm-up of ``epochs`` epochs, then ``schedule``.

    The ramp starts at ``start`` times the first value of ``schedule``, and ``schedule``'s own time
    starts when the warm-up ends. A plain number as ``schedule`` is a constant.

    >>> from thrifty.space import Constant
    >>> Warmup(2, Constant(1.0)).values(0, 4, epochs=4).tolist()
    [0.0, 0.5, 1.0, 1.0]
    """

    epochs: Number
    schedule: Schedule
    start: Number = field(default=0.0, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return a ramp, then the pieces of the inner schedule."""
        length = float(self.epochs)
        inner = self.schedule.segments(epochs - length)
        (peak,) = values_at(inner, np.zeros(1))
        up = (Segment(0.0, length, ramp(self.start * peak, peak, 0.0, length)),)
        return (*sampled(up, self.sample, length=length), *shift(inner, length))

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs + max(self.schedule.span(), 1.0))

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs)
        check_rate(self, self.sample)
