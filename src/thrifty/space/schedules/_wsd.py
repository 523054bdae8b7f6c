"""The warm-up, stable, decay schedule (WSD)."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, cosine_arc, hold, ramp
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
    cooldown: Number = field(kw_only=True)
    warmup: Number = field(default=0.0, kw_only=True)
    floor: Number = field(default=0.0, kw_only=True)
    shape: str = field(default="linear", kw_only=True)
    epochs: Number | None = field(default=None, kw_only=True)
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
        check_rate(self, self.sample)
        if self.warmup < 0:
            raise ScheduleError(f"{self!r}: warmup must not be negative")
        if self.epochs is not None and self.warmup + self.cooldown > self.epochs:
            raise ScheduleError(f"{self!r}: warmup and cooldown do not fit into epochs")
        if self.shape not in ("cosine", "linear"):
            raise ScheduleError(f'{self!r}: shape must be "cosine" or "linear"')
