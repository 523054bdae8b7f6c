"""The mean of fits to parts of the placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from thrifty.core import UsageError

from ._model import StepTimeModel
from ._setup import Setup


_LEAST = 3
"""Placements that every part has, where there are so many."""


class Bagged:
    """Several fits, each to a part of the placements of several devices; their geometric mean.

    What a model foretells beyond the largest measured scale may hang on a few placements; what most parts agree on does not (bagging, Breiman 1996, by groups).

    Args:
        make: makes a model.
        num: fits.
        share: of the placements that each of them sees.
        seed: of the parts.

    Raises:
        UsageError: a number makes no sense.

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
        """Fits all of them."""
        times = np.asarray(step_s, float)
        placements = [tuple(sorted(setup.placement)) for setup in setups]  # (4, 2) is (2, 4)
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
        """The mean of their logarithms."""
        out: np.ndarray = np.exp(
            np.mean([np.log(model.predict(setups)) for model in self._models], axis=0)
        )
        return out
