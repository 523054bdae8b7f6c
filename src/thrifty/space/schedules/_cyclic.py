"""Schedules that go up and down: cyclic, one cycle, cosine with restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, cosine_arc, ramp

from ._base_schedule import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    sampled,
    with_tail,
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

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, period=self.period)


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

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, period=self.period)
        if self.growth < 1.0:
            raise ScheduleError(f"{self!r}: growth must be at least 1, not {self.growth!r}")


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
        if not 0.0 < self.warmup < 1.0:
            raise ScheduleError(f"{self!r}: warmup is a fraction between 0 and 1")
        if self.shape not in ("cosine", "linear"):
            raise ScheduleError(f'{self!r}: shape must be "cosine" or "linear"')
