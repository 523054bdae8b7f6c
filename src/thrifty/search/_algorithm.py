"""The interface of a search algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from thrifty.space import Space

from ._history import Decision, History


class Algorithm(ABC):
    """Decides what to train and how far; a frozen dataclass of options, without any state.

    All that it knows is in the history, so a study can be resumed from its records alone.
    """

    __slots__ = ()
    max_epochs: int
    """The most epochs that any trial is trained."""

    @property
    def varied(self) -> tuple[str, ...]:
        """The hyper-parameters that it changes while a trial trains."""
        return ()

    @abstractmethod
    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """What to do next, given all that happened so far.

        Called when a worker is idle. An algorithm that knows all of its next trials gives them
        all at once, however many ``num`` asks for (the more the plan knows, the more it shares); one that
        adapts to every result gives at most ``num``. Nothing while trials run means: wait for
        them. Nothing while none runs means: the study is done.

        The answer depends on the arguments alone. ``rng`` is a fresh stream named by the seed and
        ``history.num_decisions``.
        """
