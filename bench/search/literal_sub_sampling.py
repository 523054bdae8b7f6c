"""Sub-sampling with the literal rounds of the paper, which is compared with rounds of fixed width.

On rising curves the leader's worst block is its first, which hardly any trial beats. There all
exploration comes from the threshold, and rounds are very wide or very narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from thrifty.search import Algorithm, Decision, History, RandomSampler, Sampler
from thrifty.search._algorithm import draw
from thrifty.search._halving import rungs_between
from thrifty.search._sub_sampling import Rounds, _Replay
from thrifty.search._sub_sampling_rule import Threshold, _worst_total, threshold, total
from thrifty.space import Space


def leader(scores: Mapping[int, Sequence[float]], *, previous: int | None = None) -> int:
    """Return the trial with the most observations.

    Ties go to the best mean, then to the previous leader, then to the lowest number. The rule is
    that of the code of Baudry et al., "Sub-sampling for Efficient Non-Parametric Bandit
    Exploration", NeurIPS 2020, which draws lots where this takes the lowest number.
    """
    # For equally many observations, totals compare as means do.
    return max(scores, key=lambda k: (len(scores[k]), total(tuple(scores[k])), k == previous, -k))


def is_good(challenger: Sequence[float], leader: Sequence[float], *, c: float) -> bool:
    """Return whether a challenger, rather than the leader, deserves another observation.

    It must have fewer observations than the leader. In addition, it must have fewer than ``c``
    (forced exploration), or a mean no worse than that of the leader's worst block of as many
    consecutive observations (Huang et al., "Improving Model Training with
    Multi-fidelity Hyperparameter Evaluation", MLSys 2022, after the authors' manual: vega,
    algorithms/hpo.md, 6.4). A challenger with a score of ``-inf`` or NaN
    is never good.
    """
    num = len(challenger)
    if num >= len(leader):
        return False
    if not num:
        return True  # it has no observations yet
    mine = total(tuple(challenger))
    if mine == -math.inf:
        return False
    return num < c or mine >= _worst_total(tuple(leader), num)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralRounds(Rounds):
    """Rounds that train all trials that are good against the leader, else the leader alone.

    Rounds are replayed without memory, so of exactly equal trials the lowest number leads.
    """

    threshold: Threshold = "sqrt-log"

    def _leader(self, replay: _Replay) -> int:
        return leader(replay.scores)

    def _best(self, replay: _Replay, first: int, *, number: int) -> list[int]:
        top = replay.scores[first]
        c = threshold(sum(replay.epochs.values()), self.threshold)
        others = [k for k in replay.scores if k != first]
        return [k for k in others if is_good(replay.scores[k], top, c=c)] or [first]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralSubSampling(Algorithm):
    """``FixedWidthSubSampling`` with literal rounds."""

    max_epochs: int
    num_trials: int
    eta: int = 3
    threshold: Threshold = "sqrt-log"
    sampler: Sampler = field(default_factory=RandomSampler)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the next round if one is due."""
        rungs = rungs_between(1, self.max_epochs, eta=self.eta)
        starts = repeat((0, rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        rounds = LiteralRounds(rungs=rungs, eta=self.eta, threshold=self.threshold)
        return fresh or rounds.decide(history)
