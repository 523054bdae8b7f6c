"""Step decay: drops by a factor at given epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, hold
from thrifty.space.schedules._base import (
    Number,
    Numbers,
    Schedule,
    check_milestones,
    check_positive,
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
