"""Plain gradient boosting, without any physical model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.core import MissingExtraError

from ._model import checked
from ._setup import Columns, Setup


class Boosting:
    """Scikit-learn's ``GradientBoostingRegressor`` with its defaults, on the log time.

    Args:
        seed: seed of the learner.
    """

    def __init__(self, *, seed: int = 0) -> None:
        try:
            from sklearn.ensemble import GradientBoostingRegressor  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("scikit-learn", extra="cloud") from error
        self._learner = GradientBoostingRegressor(random_state=seed)

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the trees."""
        self._learner.fit(_features(setups), np.log(checked(setups, step_s)))

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the trees' forecasts; beyond the measurements they are constant."""
        out: np.ndarray = np.exp(self._learner.predict(_features(setups)))
        return out


def _features(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [
            np.log(columns.batch),
            np.log2(columns.nodes),
            np.log2(columns.devices),
            columns.most,
            columns.least,
        ],
        1,
    )
