"""Polynomial decay: a power of the remaining time."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.space._pieces import Segment, power_arc
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
class Polynomial(Schedule):
    """Polynomial decay from ``value`` to ``floor`` as ``(1 - t / epochs) ** power``.

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Polynomial(1.0, power=2.0).values(0, 4, epochs=4).tolist()
    [1.0, 0.5625, 0.25, 0.0625]
    """

    value: Number
    power: Number = field(default=2.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one arc, then a hold."""
        length = float(self.epochs or epochs)
        arc = (
            Segment(
                0.0,
                length,
                power_arc(self.value, self.floor, 0.0, length, power=float(self.power)),
            ),
        )
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
        check_positive(self, power=self.power)
