"""Interface of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from thrifty.search._history import History
from thrifty.space import Space


class Sampler(ABC):
    """Source of the configurations of new trials: a frozen dataclass of options, without state."""

    __slots__ = ()
    adapts: ClassVar[bool] = False
    """Whether it learns from results; algorithms then ask only for trials that can start now."""

    @abstractmethod
    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Return configurations of the next ``num`` trials; fewer when the sampler is exhausted.

        The answer depends on the arguments alone. A sampler that adapts makes the configurations of
        one answer differ from each other and from those in training, so that an algorithm can ask
        for a whole pack at once.
        """
