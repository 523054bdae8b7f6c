"""The interface of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from thrifty.search._history import History
from thrifty.space import Space


class Sampler(ABC):
    """Where the configurations of new trials come from; a frozen dataclass of options, without any state."""

    __slots__ = ()

    @abstractmethod
    def sample(
        self, history: History, space: Space, *, number: int, rng: np.random.Generator
    ) -> Mapping[str, Any] | None:
        """The configuration of trial ``number``, or None when there is no further one.

        The answer depends on the arguments alone. Several trials may be drawn on one history: their numbers
        go on, and they share ``rng``.
        """
