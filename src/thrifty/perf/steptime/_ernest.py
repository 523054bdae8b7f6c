"""Ernest (Venkataraman et al., NSDI 2016): four non-negative terms of scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.perf._nonnegative import relative_fit

from ._model import checked, least_of
from ._setup import Columns, Setup


class Ernest:
    """``t = a + b scale / m + c log m + d m``, by non-negative least squares.

    For a training step, the scale per machine is the batch of one device.

    >>> model = Ernest()
    >>> setups = [Setup(placement=(1,), batch=size) for size in (8, 16)]
    >>> model.fit(setups, [1.0, 2.0])
    >>> model.predict([Setup(placement=(1,), batch=32)]).round(6).tolist()
    [4.0]
    """

    _weights: np.ndarray
    _least: float

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the four terms."""
        times = checked(setups, step_s)
        self._weights = relative_fit(_terms(setups), times)
        self._least = least_of(times)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the forecasts of the four terms."""
        out: np.ndarray = np.maximum(_terms(setups) @ self._weights, self._least)
        return out


def _terms(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [np.ones_like(columns.batch), columns.batch, np.log(columns.devices), columns.devices],
        1,
    )
