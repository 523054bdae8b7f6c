"""Schedules that fit a budget: REX, warm-up, warm-up-stable-decay, and scaling to a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from thrifty.core import ScheduleError
from thrifty.space._domain import Choice
from thrifty.space._pieces import Piece, Segment, cosine_arc, hold, ramp, rex_arc, values_at
from thrifty.space._units import Amount

from ._base_schedule import (
    Number,
    SampleRate,
    Schedule,
    Time,
    check_positive,
    sampled,
    shift,
    with_tail,
)
from ._shapes import Linear, OneArc


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class REX(OneArc):
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
    epochs: Time | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def arc(self, length: float) -> Piece:
        """Return the arc."""
        return rex_arc(self.value, self.floor, 0.0, length, d=float(self.d))

    def check_shape(self) -> None:
        """Raise ScheduleError for a ``d`` that is out of range."""
        if not 0.0 <= self.d < 1.0:
            raise ScheduleError(f"{self!r}: d must be in [0, 1), not {self.d!r}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Warmup(Schedule):
    """A linear warm-up of ``epochs`` epochs, then ``schedule``.

    The ramp starts at ``start`` times the first value of ``schedule``, and ``schedule``'s own time
    starts when the warm-up ends. A plain number as ``schedule`` is a constant.

    >>> from thrifty.space import Constant
    >>> Warmup(2, Constant(1.0)).values(0, 4, epochs=4).tolist()
    [0.0, 0.5, 1.0, 1.0]
    """

    epochs: Time
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WSD(Schedule):
    """``warmup`` epochs up, a stable phase, and ``cooldown`` epochs down to ``floor`` at the end.

    ``epochs`` is where the cooldown ends (default: the end of the run). Runs with different
    ``epochs`` share their warm-up and stable phase: cooldowns branch off one run. The ``shape`` of
    the cooldown is ``"linear"`` or ``"cosine"``.

    >>> WSD(1.0, cooldown=2).values(0, 4, epochs=4).tolist()
    [1.0, 1.0, 1.0, 0.5]

    References:
        Hu et al., "MiniCPM", 2024.
    """

    value: Number
    cooldown: Time = field(kw_only=True)
    warmup: Time = field(default=0.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    shape: str = field(default="linear", kw_only=True)
    epochs: Time | None = field(default=None, kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return a ramp, a hold, an arc, and a hold if the run is longer."""
        end = float(self.epochs or epochs)
        turn, up = end - self.cooldown, float(self.warmup)
        arc = cosine_arc if self.shape == "cosine" else ramp
        parts = (
            Segment(0.0, up, ramp(0.0, self.value, 0.0, up or 1.0)),
            Segment(up, turn, hold(self.value)),
            Segment(turn, end, arc(self.value, self.floor, turn, end)),
        )
        kept = tuple(part for part in parts if part.stop > part.start)
        return with_tail(sampled(kept, self.sample, length=end), last=self.floor, epochs=epochs)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs or self.warmup + self.cooldown)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs, cooldown=self.cooldown)
        if self.warmup < 0:
            raise ScheduleError(f"{self!r}: warmup must not be negative")
        if self.epochs is not None and self.warmup + self.cooldown > self.epochs:
            raise ScheduleError(f"{self!r}: warmup and cooldown do not fit into epochs")
        if self.shape not in ("cosine", "linear"):
            raise ScheduleError(f'{self!r}: shape must be "cosine" or "linear"')


_SHAPES: dict[str, type[REX | Linear]] = {"rex": REX, "linear": Linear}


def schedule_for(
    peak: Any,
    *,
    epochs: Time | None = None,
    extendable: bool = False,
    warmup: Time = 0.0,
    shape: str = "rex",
    cooldown: float = 0.2,
) -> Schedule:
    """Return a learning-rate schedule for a known or an extendable budget.

    For a known budget, it is ``REX`` down to 0, or linear with ``shape="linear"``. Both fit
    themselves to the run. With ``extendable``, the budget may grow: it is ``WSD``, a stable phase
    and a cooldown to 0 over the last share ``cooldown`` of ``epochs``. A longer run goes on from
    where the cooldown began. ``warmup`` counts epochs and is part of the budget. ``epochs`` and
    ``warmup`` may be amounts, such as ``steps(5_000)``. ``peak`` may be a ``Float``.

    As a first guess, REX wants about 0.8 times the peak of linear (from the convex bound of Schaipp
    et al., ICML 2025). Its ``d`` is the paper's 0.5. The REX of other programs often has
    ``d=0.9``, which holds the rate far longer (0.91 instead of 0.67 of it half way) and is not the
    paper's: write ``REX(peak, d=0.9)`` to get it.

    Raises:
        ScheduleError: The shape is unknown, ``epochs`` is missing for an extendable run, or shares
            and epochs do not fit.

    >>> schedule_for(0.1)
    REX(0.1)
    >>> schedule_for(0.1, warmup=2)
    Warmup(2, REX(0.1))
    >>> schedule_for(0.1, extendable=True, epochs=50)
    WSD(0.1, cooldown=10.0, epochs=50)

    References:
        Chen et al., "REX", MLSys 2022.
        Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations",
        NeurIPS 2024.
    """
    if shape not in _SHAPES:
        raise ScheduleError(f'schedule_for(shape={shape!r}): it is "rex" or "linear"')
    if warmup < 0 or (epochs is not None and warmup >= epochs):
        raise ScheduleError(
            f"schedule_for(warmup={warmup!r}, epochs={epochs!r}): the warm-up counts epochs, "
            "at least 0 and fewer than the run has"
        )
    if extendable:
        if epochs is None:
            raise ScheduleError(
                "schedule_for(extendable=True) needs epochs: where the run ends for now, so that "
                "its cooldown can begin before"
            )
        return _with_cooldown(peak, epochs, share=cooldown, warmup=warmup)
    kind = _SHAPES[shape]
    if not warmup:
        return kind(peak, epochs=epochs)
    return Warmup(warmup, kind(peak, epochs=None if epochs is None else epochs - warmup))


def cooldowns(
    peak: Any, *, ends: Sequence[Time], cooldown: float = 0.2, warmup: Time = 0.0
) -> Choice:
    """Return one ``WSD`` schedule for each of ``ends`` (epochs) that share one stable phase.

    Together they are one long run with a cooldown to each end. Each cools down over the last share
    ``cooldown`` of its own length, starting at a whole epoch (at a whole step, if ``ends`` are
    ``steps(...)``). In one study, the shorter schedules
    stay at 0 until ``max_epochs``: their trials idle there. Instead, run one study for each end,
    with ``max_epochs`` at that end. Studies of one task, one seed and one database share what they
    train, so only the cooldowns are trained separately.

    Raises:
        ScheduleError: ``ends`` is empty or not ascending, the share is not in (0, 1], or the
            warm-up leaves no room.

    >>> cooldowns(0.1, ends=[50, 100]).options
    (WSD(0.1, cooldown=10.0, epochs=50), WSD(0.1, cooldown=20.0, epochs=100))
    """
    if not ends or list(ends) != sorted(set(ends)):
        raise ScheduleError(
            f"cooldowns(ends={list(ends)!r}): give at least one, each later than the one before"
        )
    return Choice([_with_cooldown(peak, end, share=cooldown, warmup=warmup) for end in ends])


def _with_cooldown(peak: Any, epochs: Time, *, share: float, warmup: Time) -> WSD:
    if not 0.0 < share <= 1.0:
        raise ScheduleError(f"cooldown={share!r}: it is a share of the run, above 0 and at most 1")
    if isinstance(epochs, Amount):
        length = math.ceil(epochs.number * Fraction(repr(float(share))))
        return WSD(
            peak, cooldown=replace(epochs, number=Fraction(length)), warmup=warmup, epochs=epochs
        )
    # Start at a whole epoch, because whole epochs are shared. The 1e-9 corrects the rounding of
    # shares such as 0.2, which have no exact float.
    turn = math.floor(epochs * (1.0 - share) + 1e-9)
    return WSD(peak, cooldown=float(epochs - turn), warmup=warmup, epochs=epochs)
