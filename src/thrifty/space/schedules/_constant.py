"""A value that never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.space._pieces import Segment, hold
from thrifty.space.schedules._base import Schedule


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constant(Schedule):
    """The same value for the whole run, equivalent to giving the plain value.

    >>> Constant(0.1).values(0, 2, epochs=10).tolist()
    [0.1, 0.1]
    """

    value: Any

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one hold."""
        return (Segment(0.0, epochs, hold(self.value)),)

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return 0.0

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        # Every value that freeze() accepts is a valid constant.
