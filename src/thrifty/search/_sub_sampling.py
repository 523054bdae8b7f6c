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
    """Trains on, round after round, those who hold their own against the leader; never drops anybody for good.

    SS of Huang et al., "Bandit evaluation by sub-samples", MLSys 2022, as the authors' manual (vega,
    algorithms/hpo.md, 6.4) and code describe it. One observation is the score of one epoch. A first round trains all trials for ``min_epochs``; ``floor(log(max_epochs / min_epochs, eta))`` more follow,
    each once the one before is complete, and the last one ends at ``max_epochs``.

    ``width="fixed"``: round ``r`` trains ``num_trials // eta**r`` (at least one): the leader, which is the best of those
    trained longest, and the next best by difference at the last epoch that both have reached. It costs what successive
    halving costs and keeps as many workers busy; but whoever was left behind comes back when the others disappoint.

    ``width="literal"``: all who are good against the leader, which has the most epochs and of those the best mean; if
    nobody is, the leader alone. Good is who has fewer epochs than the leader and either fewer than ``threshold`` or a mean
    no worse than that of the leader's worst block of as many epochs. On rising curves that block is the leader's first,
    which hardly anybody beats: there all exploration comes from the threshold, and rounds are very wide or very narrow.

    Args:
        threshold: ``"sqrt-log"`` or ``"log"`` of the number of all epochs trained, or a number; literal rounds only.
        levels: those chosen are trained to the ``"round"``'s rung, or each ``"trial"`` to the rung after its own (the
            paper can be read both ways). With the latter the leader may not have come far when the rounds are over.

    After the last round the leader, if it is short of ``max_epochs``, is trained to there; should it fail, the next one.

    >>> SubSampling(max_epochs=27, num_trials=27).rungs()
    (1, 3, 9, 27)

    Raises:
        AlgorithmError: an option is out of its range, or a threshold is given to rounds of fixed width.
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
        """The epochs of the rounds; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """All trials that are not in the history yet, or the next round once the last is complete."""
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
