"""Schedules that decay: in steps, exponentially, linearly, polynomially, along a cosine."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Piece, Segment, cosine_arc, decay, hold, power_arc, ramp

from ._base_schedule import (
    Number,
    Numbers,
    SampleRate,
    Schedule,
    Values,
    check_milestones,
    check_positive,
    sampled,
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
    milestones: Numbers = ()
    gamma: Number = field(default=0.1, kw_only=True)
    every: Number | None = field(default=None, kw_only=True)

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
    milestones: Numbers = field(kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one hold for each level."""
        cuts = [float(m) for m in self.milestones]
        return tuple(
            Segment(start, stop, hold(value))
            for start, stop, value in zip(
                [0.0, *cuts], [*cuts, epochs], self.levels, strict=True
            )
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
    epochs: Number | None
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
    epochs: Number | None = field(default=None, kw_only=True)
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
    epochs: Number | None = field(default=None, kw_only=True)
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
    epochs: Number | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def arc(self, length: float) -> Piece:
        """Return the arc."""
        return cosine_arc(self.value, self.floor, 0.0, length)
