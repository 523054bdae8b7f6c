"""Interface of a search algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from thrifty.space import Space

from ._history import Decision, History


class Algorithm(ABC):
    """A search algorithm: a frozen dataclass of options, without any state.

    It decides what to train and for how long. It takes all its knowledge from the history, so a
    study can be resumed from its records alone.
    """

    __slots__ = ()
    max_epochs: int
    """Most epochs that any trial is trained."""

    @property
    def varied(self) -> tuple[str, ...]:
        """Hyper-parameters that the algorithm changes while a trial trains."""
        return ()

    @abstractmethod
    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what to do next, given the history so far.

        The study calls this when a worker is idle. An algorithm that knows all of its next trials
        returns them all at once, whatever ``num`` is: the more the search plan knows, the more it
        shares. An algorithm that adapts to every result returns at most ``num``. No decision while
        trials run means: wait for them. No decision while none runs means: the study is done.

        The answer depends on the arguments alone. ``rng`` is a fresh stream named by the seed and
        ``history.num_decisions``.
        """
