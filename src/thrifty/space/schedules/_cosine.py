"""Cosine decay."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.space._pieces import Segment, cosine_arc
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
class Cosine(Schedule):
    """Half a cosine from ``value`` to ``floor`` (Loshchilov and Hutter, 2017).

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Cosine(1.0).values(0, 4, epochs=4).round(4).tolist()
    [1.0, 0.8536, 0.5, 0.1464]
    """

    value: Number
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one arc, then a hold."""
        length = float(self.epochs or epochs)
        arc = (Segment(0.0, length, cosine_arc(self.value, self.floor, 0.0, length)),)
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
