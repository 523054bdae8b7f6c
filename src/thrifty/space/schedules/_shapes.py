"""Schedules by their shape: those that decay, those that go up and down, and those that branch off.

They decay in steps, exponentially, linearly, polynomially or along a cosine. They go up and down in
cycles, in one cycle, or along a cosine with restarts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Piece, Segment, cosine_arc, decay, hold, power_arc, ramp, scaled

from ._base_schedule import (
    Number,
    SampleRate,
    Schedule,
    Time,
    Times,
    Values,
    as_schedule,
    check_milestones,
    check_positive,
    sampled,
    shift,
    with_tail,
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step(Schedule):
    """``value``, multiplied by ``gamma`` at each milestone, or once per ``every`` epochs.

    Milestones are epochs. The products are taken one after the other, as in
    ``torch.optim.lr_scheduler.MultiStepLR``.

    >>> Step(1.0, [2, 4], gamma=0.5).values(0, 6, epochs=6).tolist()
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    >>> Step(1.0, every=3, gamma=0.5).values(0, 6, epochs=6).tolist()
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    """

    value: Number
    milestones: Times = ()
    gamma: Number = field(default=0.1, kw_only=True)
    every: Time | None = field(default=None, kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one hold for each level."""
        drops = [float(m) for m in self.milestones]
        if self.every is not None:
            drops = [i * float(self.every) for i in range(1, math.ceil(epochs / self.every))]
        out, value = [], self.value
        for start, stop in zip([0.0, *drops], [*drops, epochs], strict=True):
            out.append(Segment(start, stop, hold(value)))
            value = value * self.gamma
        return tuple(out)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return math.floor(self.milestones[-1]) + 1.0 if self.milestones else 0.0

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_milestones(self, self.milestones)
        check_positive(self, every=self.every)
        if self.every is not None and self.milestones:
            raise ScheduleError(f"{self!r}: give milestones or every, not both")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiStep(Schedule):
    """``values[0]`` until ``milestones[0]``, then ``values[1]``, and so on; values of any kind.

    >>> MultiStep([64, 128], milestones=[2]).values(0, 4, epochs=4).tolist()
    [64, 64, 128, 128]
    """

    levels: Values
    milestones: Times = field(kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one hold for each level."""
        cuts = [float(m) for m in self.milestones]
        return tuple(
            Segment(start, stop, hold(value))
            for start, stop, value in zip([0.0, *cuts], [*cuts, epochs], self.levels, strict=True)
        )

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(math.floor(self.milestones[-1]) + 1)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_milestones(self, self.milestones)
        if not self.milestones or len(self.levels) != len(self.milestones) + 1:
            raise ScheduleError(
                f"{self!r}: {len(self.levels)} values need {max(len(self.levels) - 1, 1)} "
                f"milestones, not {len(self.milestones)}"
            )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Exponential(Schedule):
    """Exponential decay, ``value * gamma ** t`` with ``t`` in epochs.

    ``sample`` is the sampling rate; ``"epoch"`` matches ``torch.optim.lr_scheduler.ExponentialLR``
    stepped once an epoch.

    >>> Exponential(1.0, gamma=0.5).values(0, 3, epochs=9).tolist()
    [1.0, 0.5, 0.25]
    """

    value: Number
    gamma: Number = field(kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one decay."""
        arc = decay(self.value, gamma=float(self.gamma), start=0.0)
        return sampled((Segment(0.0, epochs, arc),), self.sample, length=epochs)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, gamma=self.gamma)


class OneArc(Schedule, abstract=True):
    """One arc from ``value`` to ``floor`` over ``epochs`` epochs, then a hold."""

    __slots__ = ()
    value: Number
    floor: Number
    epochs: Time | None
    sample: SampleRate

    @abstractmethod
    def arc(self, length: float) -> Piece:
        """Return the arc over the first ``length`` epochs."""

    def check_shape(self) -> None:
        """Raise ScheduleError for an invalid field of this kind of arc."""

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return the arc, then a hold."""
        length = float(self.epochs or epochs)
        arc = sampled((Segment(0.0, length, self.arc(length)),), self.sample, length=length)
        return with_tail(arc, last=self.floor, epochs=epochs)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs or 0.0)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs)
        self.check_shape()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear(OneArc):
    """A straight line from ``value`` to ``floor``.

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Linear(1.0).values(0, 4, epochs=4).tolist()
    [1.0, 0.75, 0.5, 0.25]
    """

    value: Number
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Time | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def arc(self, length: float) -> Piece:
        """Return the arc."""
        return ramp(self.value, self.floor, 0.0, length)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Polynomial(OneArc):
    """Polynomial decay from ``value`` to ``floor`` as ``(1 - t / epochs) ** power``.

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Polynomial(1.0, power=2.0).values(0, 4, epochs=4).tolist()
    [1.0, 0.5625, 0.25, 0.0625]
    """

    value: Number
    power: Number = field(default=2.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Time | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def arc(self, length: float) -> Piece:
        """Return the arc."""
        return power_arc(self.value, self.floor, 0.0, length, power=float(self.power))

    def check_shape(self) -> None:
        """Raise ScheduleError for a power that is not positive."""
        check_positive(self, power=self.power)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cosine(OneArc):
    """Half a cosine from ``value`` to ``floor`` (Loshchilov and Hutter, 2017).

    ``epochs`` is its length (default: what is left of the run); afterwards the last value stays.
    ``sample`` is the sampling rate.

    >>> Cosine(1.0).values(0, 4, epochs=4).round(4).tolist()
    [1.0, 0.8536, 0.5, 0.1464]
    """

    value: Number
    floor: Number = field(default=0.0, kw_only=True)
    epochs: Time | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def arc(self, length: float) -> Piece:
        """Return the arc."""
        return cosine_arc(self.value, self.floor, 0.0, length)


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
    period: Time = field(kw_only=True)
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
    period: Time = field(kw_only=True)
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
            raise ScheduleError(f"{self!r}: growth must be at least 1, got {self.growth!r}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OneCycle(Schedule):
    """One cycle: from ``peak / div`` up to ``peak``, then down to ``peak / final_div``.

    ``warmup`` is the fraction of the run spent on the way up. ``shape`` is ``"cosine"`` or
    ``"linear"``. ``epochs`` is the length (default: what is left of the run).

    >>> OneCycle(1.0, warmup=0.5, div=5.0, shape="linear").values(0, 4, epochs=4).round(3).tolist()
    [0.2, 0.6, 1.0, 0.5]

    References:
        Smith and Topin, "Super-Convergence", 2018.
    """

    peak: Number
    warmup: Number = field(default=0.3, kw_only=True)
    div: Number = field(default=25.0, kw_only=True)
    final_div: Number = field(default=1e5, kw_only=True)
    shape: str = field(default="cosine", kw_only=True)
    epochs: Time | None = field(default=None, kw_only=True)
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Branched(Schedule):
    """A schedule until epoch ``at``, and from then on another one or a multiple of it.

    Until ``at``, the values are those that ``before`` has in the whole run, so a trial shares these
    epochs with the one that it branches off, whatever schedule it is. (``before.then(...)`` gives
    the first schedule only the epochs until ``at``, which changes schedules that fit the budget.)

    Args:
        before: The schedule, or the value, of the trial that this one branches off.
        after: The schedule, or the value, from ``at`` on; its time begins there, and it has the
            epochs that are left. None: ``before`` goes on, multiplied by ``factor``.
        at: The epoch at which they part.
        factor: What ``before`` is multiplied by if there is no ``after``.

    Raises:
        ScheduleError: A field is invalid, or a factor is given for a value that is not a number.

    >>> from thrifty.space import Linear
    >>> Branched(Linear(1.0), at=2, factor=0.5).values(0, 4, epochs=4).tolist()
    [1.0, 0.75, 0.25, 0.125]
    >>> Branched(Linear(1.0), Linear(0.2), at=2).values(0, 4, epochs=4).tolist()
    [1.0, 0.75, 0.2, 0.1]
    """

    before: Schedule
    after: Schedule | None = None
    at: Time = field(kw_only=True)
    factor: Number = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.after is not None:
            object.__setattr__(self, "after", as_schedule(self.after))
        Schedule.__post_init__(self)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return the pieces of both parts."""
        whole = self.before.segments(epochs)
        at = float(self.at)
        head = [Segment(a, min(b, at), piece) for a, b, piece in whole if a < at]
        if self.after is None:
            tail = tuple(
                Segment(max(a, at), b, scaled(piece, self.factor))
                for a, b, piece in whole
                if b > at
            )
        else:
            tail = shift(self.after.segments(epochs - at), at)
        return (*head, *tail)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        rest = 1.0 if self.after is None else max(self.after.span(), 1.0)
        return max(self.before.span(), float(self.at) + rest)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, at=self.at)
        if not _is_finite(self.factor):
            raise ScheduleError(f"{self!r}: factor must be a finite number")
        if self.after is not None and self.factor != 1.0:
            raise ScheduleError(
                f"{self!r}: factor multiplies what goes on; multiply the values of after instead"
            )


def _is_finite(number: Number) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that is too large for a float
        return False
