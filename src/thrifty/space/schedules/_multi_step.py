"""Given values from given epochs on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, hold
from thrifty.space.schedules._base import Numbers, Schedule, Values, check_milestones


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
