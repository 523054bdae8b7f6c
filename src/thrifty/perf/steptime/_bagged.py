"""Bagging: the mean of models fitted to subsets of the placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from thrifty.core import UsageError

from ._model import StepTimeModel
from ._setup import Setup


_LEAST = 3
"""Least number of placements in a subset, if there are enough."""


class Bagged:
    """Geometric mean of several fits, each to a subset of the placements of several devices.

    A single fit's forecasts beyond the largest measured scale may depend on a few placements. What
    most subsets agree on does not (bagging, Breiman 1996, by groups).

    Args:
        make: function that makes a model.
        num: number of fits.
        share: share of the placements that each fit sees.
        seed: seed of the subsets.

    Raises:
        UsageError: a number is out of range.

    >>> from thrifty.perf.steptime import Paleo
    >>> model = Bagged(Paleo)
    >>> setups = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 4, 8)]
    >>> model.fit(setups, [1.0, 1.5, 1.75, 1.875])
    >>> model.predict([Setup(placement=(1,) * 16, batch=8)]).round(2).tolist()
    [1.94]
    """

    def __init__(
        self,
        make: Callable[[], StepTimeModel],
        *,
        num: int = 8,
        share: float = 0.6,
        seed: int = 0,
    ) -> None:
        if num < 1 or not 0 < share <= 1:
            raise UsageError(
                f"there is at least one fit, to a share of 0 to 1, not num={num}, share={share}"
            )
        self._make = make
        self._num = num
        self._share = share
        self._seed = seed
        self._models: list[StepTimeModel] = []

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit all models."""
        times = np.asarray(step_s, float)
        placements = [
            tuple(sorted(setup.placement)) for setup in setups
        ]  # (4, 2) equals (2, 4)
        several = sorted({placement for placement in placements if sum(placement) > 1})
        rng = np.random.default_rng(self._seed)
        self._models = []
        for _ in range(self._num):
            num = min(len(several), max(_LEAST, round(self._share * len(several))))
            seen = {several[at] for at in rng.permutation(len(several))[:num]}
            kept = [
                at
                for at, placement in enumerate(placements)
                if sum(placement) == 1 or placement in seen
            ]
            model = self._make()
            model.fit([setups[at] for at in kept], times[kept].tolist())
            self._models.append(model)

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the geometric mean of the models' forecasts."""
        out: np.ndarray = np.exp(
            np.mean([np.log(model.predict(setups)) for model in self._models], axis=0)
        )
        return out
