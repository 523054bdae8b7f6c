"""Exponential decay: a constant factor for each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from thrifty.space._pieces import Segment, decay
from thrifty.space.schedules._base import (
    Number,
    SampleRate,
    Schedule,
    check_positive,
    check_rate,
    sampled,
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

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return 0.0

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, gamma=self.gamma)
        check_rate(self, self.sample)
