"""The reflected exponential schedule (REX)."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, rex_arc
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
class REX(Schedule):
    """REX decay from ``value`` to ``floor``: ``z / ((1 - d) + d z)`` with ``z = 1 - t / epochs``.

    ``d=0.5`` is the paper's value, ``d=0`` is linear, and ``d`` near 1 drops late. ``epochs`` is
    the length (default: what is left of the run); afterwards the last value stays. ``sample`` is
    the sampling rate.

    >>> REX(1.0).values(0, 5, epochs=5).round(4).tolist()
    [1.0, 0.8889, 0.75, 0.5714, 0.3333]

    References:
        Chen, Wolfe and Kyrillidis, "REX: Revisiting Budgeted Training with an Improved Schedule",
        MLSys 2022.
    """

    value: Number
    d: Number = field(default=0.5, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one arc, then a hold."""
        length = float(self.epochs or epochs)
        arc = (
            Segment(0.0, length, rex_arc(self.value, self.floor, 0.0, length, d=float(self.d))),
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
        if not 0.0 <= self.d < 1.0:
            raise ScheduleError(f"{self!r}: d must be in [0, 1), not {self.d!r}")
