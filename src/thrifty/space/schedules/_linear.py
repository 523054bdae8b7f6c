"""Linear decay."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.space._pieces import Segment, ramp
from thrifty.space.schedules._base import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    check_rate,
    sampled,
    with_tail,
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear(Schedule):
    """A straight line from ``value`` to ``floor``.

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Linear(1.0).values(0, 4, epochs=4).tolist()
    [1.0, 0.75, 0.5, 0.25]
    """

    value: Number
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one arc, then a hold."""
        length = float(self.epochs or epochs)
        arc = (Segment(0.0, length, ramp(self.value, self.floor, 0.0, length)),)
        return with_tail(
            sampled(arc, self.sample, length=length), last=self.floor, epochs=epochs
        )

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs or 0.0)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs)
        check_rate(self, self.sample)
