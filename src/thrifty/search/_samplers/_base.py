"""The interface of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from thrifty.search._history import History
from thrifty.space import Space


class Sampler(ABC):
    """Where the configurations of new trials come from; a frozen dataclass of options, without any state."""

    __slots__ = ()
    adapts: ClassVar[bool] = False
    """Whether it learns from results: an algorithm then asks it for no more than it can start at once."""

    @abstractmethod
    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Mapping[str, Any]]:
        """Configurations of the next ``num`` trials; fewer when there are no more.

        The answer depends on the arguments alone. A sampler that adapts makes the configurations of one answer
        differ from each other and from what is in training, so that a whole pack can be asked for at once.
        """
