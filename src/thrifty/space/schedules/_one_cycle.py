"""The one-cycle schedule: up, then down to almost zero."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, cosine_arc, ramp
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
class OneCycle(Schedule):
    """One cycle: from ``peak / div`` up to ``peak``, then down to ``peak / final_div``.

    ``warmup`` is the fraction of the run spent on the way up. ``shape`` is ``"cosine"`` or
    ``"linear"``. ``epochs`` is the length (default: what is left of the run).

    >>> OneCycle(1.0, warmup=0.5, div=5.0, shape="linear").values(0, 4, epochs=4).round(
    ...     3
    ... ).tolist()
    [0.2, 0.6, 1.0, 0.5]

    References:
        Smith and Topin, "Super-Convergence", 2018.
    """

    peak: Number
    warmup: Number = field(default=0.3, kw_only=True)
    div: Number = field(default=25.0, kw_only=True)
    final_div: Number = field(default=1e5, kw_only=True)
    shape: str = field(default="cosine", kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return an arc up and an arc down."""
        length = float(self.epochs or epochs)
        top, last = self.warmup * length, self.peak / self.final_div
        arc = cosine_arc if self.shape == "cosine" else ramp
        arcs = (
            Segment(0.0, top, arc(self.peak / self.div, self.peak, 0.0, top)),
            Segment(top, length, arc(self.peak, last, top, length)),
        )
        return with_tail(sampled(arcs, self.sample, length=length), last=last, epochs=epochs)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs or 0.0)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs, div=self.div, final_div=self.final_div)
        check_rate(self, self.sample)
        if not 0.0 < self.warmup < 1.0:
            raise ScheduleError(f"{self!r}: warmup is a fraction between 0 and 1")
        if self.shape not in ("cosine", "linear"):
            raise ScheduleError(f'{self!r}: shape must be "cosine" or "linear"')
