"""BOSS: brackets of sub-sampling with a sampler that learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from thrifty.search._algorithm import Algorithm, check_sampler
from thrifty.search._arguments import check_counts, check_halving
from thrifty.search._history import Decision, History
from thrifty.search.halving._hyperband import Bracket, ask_brackets, brackets_of
from thrifty.search.samplers import KDESampler, Sampler
from thrifty.space import Space

from ._sub_sampling import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundsOfBrackets:
    """Rule for brackets that runs rounds of sub-sampling."""

    eta: int

    def decide(
        self, history: History, *, group: int, rungs: tuple[int, ...]
    ) -> Sequence[Decision]:
        """Return the next round of a bracket if the one before is complete."""
        return Rounds(rungs=rungs, eta=self.eta).decide(history, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class BOSS(Algorithm):
    """Brackets of sub-sampling, and a model that proposes the configurations of the next bracket.

    Huang et al., "Bandit evaluation by sub-samples", MLSys 2022. Brackets come one after the other,
    so that the sampler has learnt from the earlier ones; it is fitted once per bracket. Workers
    that would have to wait for a round to end start the next bracket. With a sampler that does not
    learn, all brackets are proposed at once. ``Trial.group`` is the bracket.

    All brackets are as wide as Hyperband's first. On tables of real curves, this did better than
    the paper's brackets, which get narrower and start longer (``bench/results/search_*``).

    Args:
        max_epochs: most epochs that a trial is trained.
        eta: ratio between the epochs of successive rounds.
        num_trials: number of trials; brackets repeat until all are drawn (default: as many brackets
            as Hyperband has).
        sampler: the model (``RandomForestSampler()`` is the one in the authors' code).

    Raises:
        AlgorithmError: an option is out of range.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in BOSS(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (9, (1, 3, 9)), (9, (1, 3, 9))]
    """

    max_epochs: int
    eta: int = 3
    num_trials: int | None = None
    sampler: Sampler = field(default_factory=KDESampler)

    def __post_init__(self) -> None:
        check_halving(self, eta=self.eta, min_epochs=1, max_epochs=self.max_epochs)
        if self.num_trials is not None:
            check_counts(self, num_trials=self.num_trials)
        check_sampler(self, self.sampler)

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets, all equally wide; with ``num_trials``, as many as it needs."""
        return brackets_of(
            self.max_epochs, eta=self.eta, num_trials=self.num_trials, ladder="widest"
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return the next rounds of complete brackets, or new trials of the next bracket."""
        return ask_brackets(
            self.brackets(),
            _RoundsOfBrackets(eta=self.eta),
            sampler=self.sampler,
            history=history,
            space=space,
            num=None,
            rng=rng,
        )
