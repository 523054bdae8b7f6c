"""Local size of forecast errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thrifty.core import MissingExtraError

from ._setup import Columns, Setup


_MANY = 100
"""Least number of errors from which their local size can be learned."""


class LocalErrors:
    """Size of errors around a setup, as a factor on the overall size.

    Trees learn it from the errors of held-out placements (locally weighted conformal prediction,
    Lei et al. 2018).

    Args:
        setups: setups with known errors.
        errors: absolute errors, [setups]; with few of them, the factor is 1 everywhere.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """

    def __init__(self, setups: Sequence[Setup], errors: np.ndarray) -> None:
        self._trees: Any = None
        if len(errors) < _MANY:
            return
        try:
            from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("scikit-learn", extra="cloud") from error
        self._trees = HistGradientBoostingRegressor(
            loss="absolute_error",
            max_iter=60,
            learning_rate=0.05,
            max_leaf_nodes=8,
            min_samples_leaf=20,
            early_stopping=False,
            random_state=0,
        )
        # Zero errors have no logarithm; errors far below the mean need not be told apart from zero.
        logs = np.log(errors + 0.1 * errors.mean() + 1e-12)
        self._trees.fit(_columns(setups), logs - logs.mean())

    def __call__(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return factors, [setups]."""
        if self._trees is None or not setups:
            return np.ones(len(setups))
        out: np.ndarray = np.exp(self._trees.predict(_columns(setups)))
        return out


def _columns(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [np.log(columns.batch), columns.nodes, columns.devices, columns.most, columns.least], 1
    )
