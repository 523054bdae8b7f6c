"""The schedule of a trial that branches off another one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thrifty.core import ScheduleError
from thrifty.space._pieces import Segment, scaled

from ._base_schedule import Number, Schedule, Time, as_schedule, check_positive, shift


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
