"""What every model of step times does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from thrifty.core import UsageError

from ._setup import Setup


class StepTimeModel(Protocol):
    """From measured step times to those of other setups."""

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Learns from measurements, some of them of one device alone.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
        """
        ...

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Seconds of a step of each setup, [setups]; after ``fit``."""
        ...


_LEAST = 1e-6
"""Share of the shortest measured step that no forecast is below."""


def checked(setups: Sequence[Setup], step_s: Sequence[float]) -> np.ndarray:
    """Measured times as an array.

    Raises:
        UsageError: nothing was measured, or a time is not positive.
    """
    times = np.asarray(step_s, float)
    if times.shape != (len(setups),) or not times.size:
        raise UsageError(
            f"one time for each of at least one setup, not {times.shape} for {len(setups)}"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UsageError("step times are positive and finite")
    return times


def least_of(times: np.ndarray) -> float:
    """What keeps a sum positive whose terms all vanish, as those of exchange do for one device."""
    return _LEAST * float(times.min())
