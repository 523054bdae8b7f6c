"""Interface of step-time models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from thrifty.core import UsageError

from ._setup import Setup


class StepTimeModel(Protocol):
    """Model that predicts the step times of new setups from measured ones."""

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the model to measurements, some of them of a single device.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
        """
        ...

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the seconds of a step of each setup, [setups]; call ``fit`` first."""
        ...


_LEAST = 1e-6
"""Lower bound of forecasts, as a share of the shortest measured step."""


def checked(setups: Sequence[Setup], step_s: Sequence[float]) -> np.ndarray:
    """Return measured times as an array.

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
    """Return the lower bound of forecasts.

    It keeps a sum positive when all its terms vanish, as exchange terms do for one device.
    """
    return _LEAST * float(times.min())
