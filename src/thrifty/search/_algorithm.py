"""The interface of a search algorithm, and what all algorithms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._history import Decision, History, Proposal
from .samplers import Sampler


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


def check_sampler(owner: object, sampler: object) -> None:
    """Raise AlgorithmError unless ``sampler`` is a sampler."""
    if not isinstance(sampler, Sampler):
        hint = f"{sampler.__name__}()" if isinstance(sampler, type) else "RandomSampler()"
        raise AlgorithmError(
            f"{type(owner).__name__}(sampler={sampler!r}): give a sampler, such as {hint}"
        )


def draw(
    sampler: Sampler,
    history: History,
    space: Space,
    *,
    starts: Iterable[tuple[int, int]],
    num: int,
    rng: np.random.Generator,
) -> list[Proposal]:
    """Return one new trial for each ``(group, target)`` of ``starts``, enqueued ones first.

    There are fewer if the sampler is exhausted, and at most ``num`` if it learns from results.
    """
    places = list(islice(starts, num) if sampler.adapts else starts)
    configs = list(history.next_enqueued(len(places)))
    missing = len(places) - len(configs)
    if missing:
        configs += sampler.sample(history, space, num=missing, rng=rng)
    return [
        Proposal(target=target, config=config, group=group)
        for (group, target), config in zip(places, configs, strict=False)
    ]
