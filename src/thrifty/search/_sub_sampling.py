"""Synchronous sub-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History
from ._rungs import rungs_between
from ._samplers import RandomSampler, Sampler
from ._sub_rounds import Levels, Rounds, Width, check_rounds
from ._sub_samples import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class SubSampling(Algorithm):
    """Sub-sampling in rounds: trains the trials that hold their own against the leader.

    No trial is dropped for good. This is SS of Huang et al., "Bandit evaluation by sub-samples",
    MLSys 2022, as the authors' manual (vega, algorithms/hpo.md, 6.4) and code describe it. One
    observation is the score of one epoch.

    A first round trains all trials for ``min_epochs``. Then ``floor(log(max_epochs / min_epochs,
    eta))`` rounds follow, each once the one before is complete; the last one ends at
    ``max_epochs``. After the last round, if the leader has not reached ``max_epochs``, it is
    trained to there; if it fails, the next trial is.

    ``width="fixed"``: round ``r`` trains ``num_trials // eta**r`` trials (at least one). They are
    the leader, which is the best of the trials trained longest, and the next best by difference at
    the last epoch that both have reached. This costs as much as successive halving and keeps as
    many workers busy, but a trial left behind comes back when the others disappoint.

    ``width="literal"``: a round trains all trials that are good against the leader, or the leader
    alone if none is. The leader has the most epochs, and of those trials the best mean. A trial is
    good if it has fewer epochs than the leader, and either fewer than ``threshold`` or a mean no
    worse than that of the leader's worst block of as many epochs. On rising curves that block is
    the leader's first, which hardly any trial beats. There all exploration comes from the
    threshold, and rounds are very wide or very narrow.

    Args:
        max_epochs: most epochs that a trial is trained.
        num_trials: number of trials.
        eta: ratio between the epochs of successive rounds.
        min_epochs: epochs of the first round.
        threshold: ``"sqrt-log"`` or ``"log"`` of the number of all epochs trained, or a number; for
            literal rounds only.
        width: how a round chooses its trials, ``"fixed"`` or ``"literal"``.
        levels: ``"round"``: the chosen trials are trained to the round's rung; ``"trial"``: each of
            them is trained to the rung after its own (the paper can be read both ways). With the
            latter, the leader may not have come far when the rounds are over.
        sampler: source of the configurations.

    Raises:
        AlgorithmError: an option is out of range, or a threshold is given for rounds of fixed
            width.

    >>> SubSampling(max_epochs=27, num_trials=27).rungs()
    (1, 3, 9, 27)
    """

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    threshold: Threshold = "sqrt-log"
    width: Width = "fixed"
    levels: Levels = "round"
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(self, num_trials=self.num_trials)
        check_halving(
            self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs
        )
        check_rounds(self, threshold=self.threshold, width=self.width, levels=self.levels)
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs of the rounds; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the next round if one is due."""
        rounds = Rounds(
            rungs=self.rungs(),
            eta=self.eta,
            threshold=self.threshold,
            width=self.width,
            levels=self.levels,
        )
        starts = repeat((0, rounds.rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return fresh or rounds.decide(history)
