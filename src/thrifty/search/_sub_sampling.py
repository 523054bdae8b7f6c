"""Sub-sampling (SS), a bandit that compares sub-samples of learning curves; BOSS."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, repeat
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.search.samplers._base_sampler import option_error
from thrifty.space import Space

from ._algorithm import Algorithm, draw
from ._halving import Bracket, BracketAlgorithm, RungAlgorithm, ask_brackets, best, brackets_of
from ._history import Decision, History, Leaderboard, Proposal, SortedList, Trial
from .samplers import KDESampler, Sampler


Threshold = Literal["sqrt-log", "log"] | float
"""Number of observations that every trial gets in any case.

It is a function of the number of all observations, or a constant.
"""

HUGE = 1e300
"""Bound below which sums of numbers do not overflow."""


def check_threshold(owner: object, threshold: object) -> None:
    """Raise AlgorithmError unless ``threshold`` names a function or is a positive finite number."""
    if isinstance(threshold, str):
        right = threshold in ("sqrt-log", "log")
    else:
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        right = is_number and 0 < threshold < math.inf  # type: ignore[operator]
    if not right:
        advice = "give 'sqrt-log', 'log' or a positive number of epochs"
        raise option_error(owner, advice, threshold=threshold)


def threshold(num: int, kind: Threshold) -> float:
    """Return the fewest observations per trial when all trials together have ``num``.

    The theory allows anything that grows faster than ``log(log(n))`` and slower than ``log(n)``;
    ``"log"`` is at the edge (Chan, "The multi-armed bandit problem: an efficient nonparametric
    solution", Annals of Statistics 2020). The value is never rounded: on learning curves all
    exploration comes from it, and 1.8 rounded down to 1 would be none at all.

    >>> round(threshold(27, "sqrt-log"), 3), round(threshold(27, "log"), 3), threshold(27, 4)
    (1.815, 3.296, 4.0)
    """
    if not isinstance(kind, str):
        return float(kind)
    log = math.log(max(num, 1))
    return math.sqrt(log) if kind == "sqrt-log" else log


def bar(leader: Sequence[float], num: int) -> float:
    """Return the least ``total`` with which a challenger is good without forced exploration.

    The challenger has ``num`` observations, fewer than the leader.

    >>> bar([0.2, 0.5, 0.6], 2)
    0.7
    """
    # If the leader's block contains -inf, every challenger without -inf is good.
    return max(_worst_total(tuple(leader), num), -sys.float_info.max)


def difference(challenger: Sequence[float], leader: Sequence[float]) -> float:
    """Return the challenger's score minus the leader's at the last epoch that both have reached.

    The result is never NaN: the worst score differs by ``-inf`` from any score, including itself.

    >>> difference([0.1, 0.5], [0.2, 0.4, 0.9]), difference([float("nan")], [0.2])
    (0.09999999999999998, -inf)
    """
    last = min(len(challenger), len(leader)) - 1
    if last < 0:
        return 0.0
    return gap(_worst_if_nan(challenger[last]), _worst_if_nan(leader[last]))


def gap(one: float, other: float) -> float:
    """Return the ``difference`` of two scores that are not NaN."""
    return -math.inf if one == -math.inf else 0.0 if one == other else one - other


@lru_cache(maxsize=1024)  # one leader is compared with many challengers of few lengths
def _worst_total(scores: tuple[float, ...], length: int) -> float:
    """Return the least sum of ``length`` consecutive scores, as exactly as ``total``.

    Trials that share all of their training so far have the same scores and must tie exactly. So
    prefix sums only narrow down which blocks to sum exactly.
    """
    starts: Sequence[int] = range(len(scores) - length + 1)
    values = np.array(scores)
    if np.abs(values).max() < HUGE:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        totals = sums[length:] - sums[:-length]
        slack = 4 * np.finfo(float).eps * len(scores) * np.abs(values).sum()
        starts = np.flatnonzero(totals <= totals.min() + slack).tolist()
    return min(total(scores[start : start + length]) for start in starts)


@lru_cache(maxsize=1 << 14)  # most challengers are the same whenever a worker is free
def total(scores: tuple[float, ...]) -> float:
    """Return the sum, rounded once; ``-inf`` if any score is ``-inf`` or NaN."""
    if not all(score > -math.inf for score in scores):
        return -math.inf
    try:
        return math.fsum(scores)
    except OverflowError:
        return math.fsum(score / len(scores) for score in scores) * len(scores)


def _worst_if_nan(score: float) -> float:
    return -math.inf if math.isnan(score) else score


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rule that decides which trials each round trains.

    No trial is ever out: a round may resume a trial that an earlier round left behind. ``rungs``
    are the epochs of the rounds. All trials of the group take part in the first round.
    """

    rungs: tuple[int, ...]
    eta: int

    def decide(self, history: History, *, group: Hashable = 0) -> list[Decision]:
        """Return the open decisions of the first unfinished round.

        There are none while the round runs, or after the last round. All earlier rounds are
        replayed, so a round that was recorded only in part before an interruption is completed.
        """
        over = _OVER.setdefault(history, set())
        if (self, group) in over or history.is_running(group):
            return []
        replay = _Replay.of(history, group)
        if not replay.play(dict.fromkeys(replay.trials, self.rungs[0])):
            return []
        for number in count(1):
            chosen = self._chosen(replay, number)
            if not chosen:
                over.add((self, group))
                return []
            missing = [k for k in chosen if replay.trials[k].target < chosen[k]]
            if missing:
                return [Proposal(target=chosen[k], trial=k, group=group) for k in missing]
            if not replay.play(chosen):
                return []
        raise AssertionError("unreachable")

    def _chosen(self, replay: _Replay, number: int) -> dict[int, int]:
        """Return the trials of round ``number`` (0 is the first) with their targets."""
        replay = replay.able(self.rungs[min(number, len(self.rungs) - 1)])
        if not replay.scores:
            return {}
        first = self._leader(replay)
        if number >= len(self.rungs):
            # The rounds are over. The leader falls short of the end only after a failure.
            unfinished = replay.epochs[first] < self.rungs[-1]
            return {first: self.rungs[-1]} if unfinished else {}
        return dict.fromkeys(self._best(replay, first, number=number), self.rungs[number])

    def _leader(self, replay: _Replay) -> int:
        return max(replay.scores, key=replay.standing)

    def _best(self, replay: _Replay, first: int, *, number: int) -> list[int]:
        """Return the trials that round ``number`` trains, of which ``first`` leads."""
        top = replay.scores[first]
        others = [k for k in replay.scores if k != first]
        places = max(len(replay.trials) // self.eta**number, 1)
        board = Leaderboard(SortedList((-difference(replay.scores[k], top), k) for k in others))
        return [first, *(best(board, places - 1) if places > 1 else ())]


_OVER: WeakKeyDictionary[History, set[tuple[Rounds, Hashable]]] = WeakKeyDictionary()
"""Groups whose last round is over.

A history only grows, so these groups need no replay whenever a worker is free.
"""


@dataclass(slots=True, kw_only=True)
class _Replay:
    """State of a group after some past round."""

    trials: dict[int, Trial]
    epochs: dict[int, int]
    """Epoch that each trial was asked to reach; trials that failed on the way count as observed."""
    scores: dict[int, tuple[float, ...]]
    """One score for each epoch, of the trials that had not failed."""

    @classmethod
    def of(cls, history: History, group: Hashable) -> _Replay:
        return cls(trials={k: history[k] for k in history.in_group(group)}, epochs={}, scores={})

    def play(self, targets: dict[int, int]) -> bool:
        """Move trials to their targets; return whether all have reached them or failed."""
        for k, target in targets.items():
            trial = self.trials[k]
            self.epochs[k] = target
            if trial.reached >= target:
                self.scores[k] = trial.scores[:target]
            elif trial.state in ("failed", "stopped"):
                self.scores.pop(k, None)
            else:
                return False
        return True

    def able(self, target: int) -> _Replay:
        """Return the group without the trials that a person has stopped before an epoch."""
        gone = {k for k, t in self.trials.items() if t.state == "stopped" and t.reached < target}
        return replace(self, scores={k: s for k, s in self.scores.items() if k not in gone})

    def standing(self, k: int) -> tuple[int, float, int]:
        """Return a sort key: more epochs rank first, then a better score, then an earlier trial."""
        return len(self.scores[k]), self.scores[k][-1], -k


@dataclass(frozen=True, slots=True, kw_only=True)
class SubSampling(RungAlgorithm):
    """Sub-sampling in rounds: trains the trials that hold their own against the leader.

    No trial is dropped for good. This is SS of Huang et al., "Bandit evaluation by sub-samples",
    MLSys 2022, as the authors' manual (vega, algorithms/hpo.md, 6.4) and code describe it. One
    observation is the score of one epoch.

    A first round trains all trials for ``min_epochs``. Then ``floor(log(max_epochs / min_epochs,
    eta))`` rounds follow, each once the one before is complete; the last one ends at
    ``max_epochs``. After the last round, if the leader has not reached ``max_epochs``, it is
    trained to there; if it fails, the next trial is.

    Round ``r`` trains ``num_trials // eta**r`` trials (at least one) to its rung. They are the
    leader, which is the best of the trials trained longest, and the next best by difference at the
    last epoch that both have reached. This costs as much as successive halving and keeps as many
    workers busy, but a trial left behind comes back when the others disappoint.

    Args:
        max_epochs: most epochs that a trial is trained.
        num_trials: number of trials.
        eta: ratio between the epochs of successive rounds.
        min_epochs: epochs of the first round.
        sampler: source of the configurations.

    Raises:
        AlgorithmError: an option is out of range.

    >>> SubSampling(max_epochs=27, num_trials=27).rungs()
    (1, 3, 9, 27)
    """

    def why_not_longer(self, before: int) -> str:
        """Return why a longer training would be another one: its rounds depend on each other."""
        return Algorithm.why_not_longer(self, before)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the next round if one is due."""
        rounds = Rounds(rungs=self.rungs(), eta=self.eta)
        starts = repeat((0, rounds.rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return fresh or rounds.decide(history)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundsOfBrackets:
    """Rule for brackets that runs rounds of sub-sampling."""

    eta: int

    def decide(self, history: History, *, group: int, rungs: tuple[int, ...]) -> Sequence[Decision]:
        """Return the next round of a bracket if the one before is complete."""
        return Rounds(rungs=rungs, eta=self.eta).decide(history, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class BOSS(BracketAlgorithm):
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

    sampler: Sampler = field(default_factory=KDESampler)

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
