"""Perfect scaling: exchanging costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._alone import Alone
from ._model import checked
from ._setup import Columns, Setup


class PerfectScaling:
    """A step takes what one device takes with its batch; the bound that none exceeds for long.

    >>> model = PerfectScaling()
    >>> model.fit([Setup(placement=(1,), batch=8), Setup(placement=(1,), batch=16)], [1.0, 2.0])
    >>> model.predict([Setup(placement=(4, 4), batch=16)]).round(6).tolist()
    [2.0]
    """

    _alone: Alone

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Learns one device's step times."""
        self._alone = Alone(Columns.of(setups), checked(setups, step_s))

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Those of one device."""
        return self._alone(Columns.of(setups).batch)
