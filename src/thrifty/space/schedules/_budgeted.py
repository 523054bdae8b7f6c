"""Schedules that fit a budget: REX, warm-up, warm-up-stable-decay, and scaling to a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from thrifty.core import ScheduleError
from thrifty.space._domain import Choice
from thrifty.space._pieces import (
    Piece,
    Segment,
    cosine_arc,
    exponential_arc,
    hold,
    mirrored_power_arc,
    ramp,
    rex_arc,
    values_at,
)
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
            raise ScheduleError(f"{self!r}: d must be in [0, 1), got {self.d!r}")


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


COOLDOWN_SHAPES: dict[str, Callable[[float, float, float, float], Piece]] = {
    "linear": ramp,
    "cosine": cosine_arc,
    "1-sqrt": partial(mirrored_power_arc, power=0.5),
    "square": partial(mirrored_power_arc, power=2.0),
    "exp": exponential_arc,
}
"""The arcs of cooldowns by name, from a value to another between two times."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WSD(Schedule):
    """``warmup`` epochs up, a stable phase, and ``cooldown`` epochs down to ``floor`` at the end.

    ``epochs`` is where the cooldown ends (default: the end of the run). Runs with different
    ``epochs`` share their warm-up and stable phase: cooldowns branch off one run. With ``u`` from
    0 to 1 over the cooldown, the ``shape`` of the cooldown is

    - ``"linear"``: ``1 - u``,
    - ``"cosine"``: ``(1 + cos(pi u)) / 2``,
    - ``"1-sqrt"``: ``1 - sqrt(u)``, which falls fast at first,
    - ``"square"``: ``1 - u ** 2``, which falls late,
    - ``"exp"``: ``(floor / value) ** u``, which needs a ``floor`` above 0.

    >>> WSD(1.0, cooldown=2).values(0, 4, epochs=4).tolist()
    [1.0, 1.0, 1.0, 0.5]
    >>> WSD(1.0, cooldown=4, shape="1-sqrt").values(0, 4, epochs=4).round(4).tolist()
    [1.0, 0.5, 0.2929, 0.134]

    References:
        Hu et al., "MiniCPM", 2024.
        Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations",
        NeurIPS 2024.
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
        arc = COOLDOWN_SHAPES[self.shape]
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
        if self.shape not in COOLDOWN_SHAPES:
            known = ", ".join(f'"{name}"' for name in COOLDOWN_SHAPES)
            raise ScheduleError(f"{self!r}: shape must be one of {known}")
        if self.shape == "exp" and not 0 < self.floor <= self.value:
            raise ScheduleError(
                f"{self!r}: an exponential cooldown never reaches 0; give a floor above 0 and at "
                "most the value"
            )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trunk(Schedule):
    """A warm-up of ``warmup`` epochs, then a constant ``value``: the trunk of a ``Ladder``.

    It equals ``WSD`` before the cooldown. In a ladder, a trial with this schedule ends after
    ``epochs`` epochs, and its metrics are those of the weights' ``average`` (``"ema"`` or
    ``"swa"``) that the task keeps.

    >>> Trunk(1.0, epochs=3, warmup=1, average="swa").values(0, 3, epochs=3).tolist()
    [0.0, 1.0, 1.0]
    """

    value: Number
    epochs: Time = field(kw_only=True)
    warmup: Time = field(default=0.0, kw_only=True)
    average: str = field(kw_only=True)
    sample: SampleRate = field(default="step", kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return a ramp and a hold."""
        end, up = max(float(self.epochs), epochs), float(self.warmup)
        parts = (
            Segment(0.0, up, ramp(0.0, self.value, 0.0, up or 1.0)),
            Segment(up, end, hold(self.value)),
        )
        kept = tuple(part for part in parts if part.stop > part.start)
        return sampled(kept, self.sample, length=end)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.epochs)

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, epochs=self.epochs)
        if not 0 <= self.warmup <= self.epochs:
            raise ScheduleError(f"{self!r}: warmup must be from 0 to epochs")
        if self.average not in AVERAGES:
            raise ScheduleError(f'{self!r}: average must be "ema" or "swa"')


AVERAGES = ("ema", "swa")
"""The averages of weights whose metrics a trunk's trial may have."""


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
    ``steps(...)``). In one study, the shorter schedules stay at 0 until ``max_epochs``: their
    trials idle there. Use a ``Ladder``, whose trials end where their cooldowns end.

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
    return WSD(peak, cooldown=cooldown_of(epochs, share=share), warmup=warmup, epochs=epochs)


def cooldown_of(epochs: float, *, share: float) -> float:
    """Return the length of a cooldown over a share of a run, starting at a whole epoch.

    >>> cooldown_of(10, share=0.2), cooldown_of(12, share=0.2)
    (2.0, 3.0)
    """
    # Whole epochs are shared. The 1e-9 corrects the rounding of shares such as 0.2, which have no
    # exact float.
    return float(epochs - math.floor(epochs * (1.0 - share) + 1e-9))
