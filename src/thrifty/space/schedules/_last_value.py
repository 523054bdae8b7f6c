"""The value at the end of a schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from thrifty.space._pieces import Hold
from thrifty.space.schedules._base import Schedule


def last_value(schedule: Schedule, *, epochs: float) -> Any:
    """Return the value that a schedule has reached at the end of a run of ``epochs`` epochs.

    No step of the run uses this value.

    Raises:
        ScheduleError: The schedule is longer than the run.

    >>> from thrifty.space import REX, Step
    >>> last_value(REX(0.1), epochs=5), last_value(Step(0.5, [3], gamma=0.5), epochs=5)
    (0.0, 0.25)
    """
    piece = schedule.segments(epochs)[-1].piece
    if isinstance(piece, Hold):
        return piece.value
    return piece.at(np.array([float(epochs)])).tolist()[0]
