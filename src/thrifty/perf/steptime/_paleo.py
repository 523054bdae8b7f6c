"""Paleo (Qi et al., ICLR 2017): an analytical model of compute and ring all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.perf._nonnegative import relative_fit

from ._alone import Alone
from ._model import checked, least_of
from ._setup import Columns, Setup


class Paleo:
    """One device's time, plus a ring between machines and a ring inside them, without overlap.

    The published model takes bytes, FLOPs and peak speeds, and fits which share of its peak a
    platform reaches. Fitted coefficients of the three terms have the same freedom, and need no data
    sheets.

    >>> model = Paleo()
    >>> model.fit(
    ...     [Setup(placement=(1,), batch=8), Setup(placement=(1, 1), batch=8)], [1.0, 1.5]
    ... )
    >>> model.predict([Setup(placement=(1,) * 4, batch=8)]).round(6).tolist()
    [1.75]
    """

    _alone: Alone
    _weights: np.ndarray
    _least: float

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the cost of the rings."""
        times = checked(setups, step_s)
        self._alone = Alone(Columns.of(setups), times)
        self._weights = relative_fit(self._terms(setups), times)
        self._least = least_of(times)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the time of compute plus rings."""
        out: np.ndarray = np.maximum(self._terms(setups) @ self._weights, self._least)
        return out

    def _terms(self, setups: Sequence[Setup]) -> np.ndarray:
        columns = Columns.of(setups)
        rings = [(n - 1) / n for n in (columns.nodes, columns.most)]
        return np.stack([self._alone(columns.batch), *rings], 1)
