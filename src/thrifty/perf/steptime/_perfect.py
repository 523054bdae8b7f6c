"""Perfect scaling: exchanging gradients costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._alone import Alone
from ._model import checked
from ._setup import Columns, Setup


class PerfectScaling:
    """Step time of one device with its batch: the bound that no placement beats for long.

    >>> model = PerfectScaling()
    >>> model.fit([Setup(placement=(1,), batch=8), Setup(placement=(1,), batch=16)], [1.0, 2.0])
    >>> model.predict([Setup(placement=(4, 4), batch=16)]).round(6).tolist()
    [2.0]
    """

    _alone: Alone

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit one device's step times."""
        self._alone = Alone(Columns.of(setups), checked(setups, step_s))

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the step times of one device."""
        return self._alone(Columns.of(setups).batch)
