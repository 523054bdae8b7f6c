"""The rule of sub-sampling (SS): which trials train further whenever a worker is free."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.search.samplers._base_sampler import option_error

from ._history import History, Proposal, SortedList, Trial


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


Entry = tuple[float, int]
"""``(-score, trial)`` on a board, or ``(behind, trial)``: the leader's score minus the trial's."""


class Standing:
    """Counts and boards of some trials of a history.

    They depend on these trials alone, and not on when or how often they are read.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        """Number of epochs of all trials; those of a failed trial count up to its target."""
        self.targets: Counter[int] = Counter()
        """Number of trials last asked to reach each epoch."""
        self.running: Counter[int] = Counter()
        """Number of those of them that are in training."""
        self.waiting: dict[int, Challengers] = {}
        """Waiting trials, by epoch."""
        self._alive: dict[int, SortedList[Entry]] = {}
        """Trials that have not failed, by the last epoch that they have reported."""

    @classmethod
    def of(cls, history: History) -> Standing:
        """Return the up-to-date standing of all trials of a history."""
        return Standings.of(history).by_group[None]

    def leader(self, history: History) -> Trial | None:
        """Return the best of the trials that have reported most epochs."""
        if not self._alive:
            return None
        return history[self._alive[max(self._alive)][0][1]]

    def challengers(self, leader: Trial) -> dict[int, Challengers]:
        """Return waiting trials with fewer epochs than the leader, by epoch, as good and rest."""
        found = {e: each for e, each in self.waiting.items() if e < leader.reached and each}
        for epoch, each in found.items():
            each.split_at(leader, epoch)
        return found

    def count(self, trial: Trial, change: int) -> None:
        """Add a trial (``change=1``) in its present state, or take it out (-1)."""
        failed = trial.state == "failed"
        self.targets[trial.target] += change
        if trial.state == "running":
            self.running[trial.target] += change
        self.num_observed += change * (trial.target if failed else trial.reached)
        if failed or not trial.reached:
            return
        entry = (-trial.scores[-1], trial.number)
        board = self._alive.setdefault(trial.reached, SortedList())
        board.add(entry) if change > 0 else board.remove(entry)
        if not board:
            del self._alive[trial.reached]
        if trial.state == "waiting":
            waiting = self.waiting.setdefault(trial.reached, Challengers())
            waiting.add(trial) if change > 0 else waiting.remove(trial)


class Standings:
    """Standings of one history, of all its trials (under None) or of each group."""

    def __init__(self, *, grouped: bool) -> None:
        self.by_group: defaultdict[Hashable, Standing] = defaultdict(Standing)
        self.changed: set[Hashable] = set()
        """Groups that have changed since the last decision about them."""
        self._grouped = grouped
        self._known: list[Trial | None] = []
        """Each trial as it was when last counted."""
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, *, rule: Hashable = None) -> Standings:
        """Return the standings of a history, which read the records since the last call.

        Args:
            history: The history.
            rule: Whose ``changed`` it is, to have one standing for each group (default: one for
                all trials).
        """
        of_history = _KNOWN.setdefault(history, {})
        if rule not in of_history:
            of_history[rule] = cls(grouped=rule is not None)
        found = of_history[rule]
        found._catch_up(history)
        return found

    def _catch_up(self, history: History) -> None:
        self._known += [None] * (len(history) - len(self._known))
        moves = history.moves
        for number in moves[self._num_moves :]:
            before, now = self._known[number], history[number]
            if before is now:
                continue  # the trial changed several times, and its last state was already counted
            self._known[number] = now
            group = now.group if self._grouped else None
            standing = self.by_group[group]
            if before is not None:
                standing.count(before, -1)
            standing.count(now, 1)
            self.changed.add(group)
        self._num_moves = len(moves)


class Challengers:
    """Trials that wait at one epoch: ``good`` ones and the ``rest``.

    Scores of good trials sum to the leader's bar or more. Both are boards of ``(-score, trial)``. A
    new leader moves only the trials between its bar and the old one.
    """

    __slots__ = ("_bar", "_leader", "_totals", "good", "rest")

    def __init__(self) -> None:
        self.good: SortedList[Entry] = SortedList()
        self.rest: SortedList[Entry] = SortedList()
        self._totals: SortedList[tuple[float, int, float]] = SortedList()
        """``(sum of scores, trial, -score)``, ascending."""
        self._bar = math.inf
        self._leader: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self._totals)

    def add(self, trial: Trial) -> None:
        """Add a trial that has begun to wait."""
        summed, key = total(trial.scores), -trial.scores[-1]
        self._totals.add((summed, trial.number, key))
        self._side(summed).add((key, trial.number))

    def remove(self, trial: Trial) -> None:
        """Remove a trial that no longer waits."""
        summed, key = total(trial.scores), -trial.scores[-1]
        self._totals.remove((summed, trial.number, key))
        self._side(summed).remove((key, trial.number))

    def split_at(self, leader: Trial, epoch: int) -> None:
        """Update ``good`` and ``rest`` for a leader."""
        if leader.scores is self._leader:
            return
        self._leader = leader.scores
        before, self._bar = self._bar, bar(leader.scores, epoch)
        low, high = sorted((before, self._bar))
        first, last = (self._totals.rank((at, -1, 0.0)) for at in (low, high))
        source, target = self.rest, self.good
        if self._bar > before:
            source, target = self.good, self.rest
        for _, number, key in self._totals[first:last]:
            source.remove((key, number))
            target.add((key, number))

    def _side(self, summed: float) -> SortedList[Entry]:
        return self.good if summed >= self._bar else self.rest


def ranked(board: SortedList[Entry], *, top: float) -> Iterator[Entry]:
    """Yield ``(behind, trial)`` of a board, least behind ``top`` first, then the earlier trial.

    The board holds ``(-score, trial)``. Evaluation is lazy, so the first few of many cost little.
    Different scores may have the same rounded difference from ``top``; such trials tie, so their
    runs of equal scores are merged by number.
    """
    at, size = 0, len(board)
    while at < size:
        behind = -gap(-board[at][0], top)
        runs = []
        while at < size and -gap(-board[at][0], top) == behind:
            stop = board.rank((board[at][0], sys.maxsize))
            runs.append(islice(board.iterate(at), stop - at))
            at = stop
        for _, number in runs[0] if len(runs) == 1 else merge(*runs, key=itemgetter(1)):
            yield behind, number


_KNOWN: WeakKeyDictionary[History, dict[Hashable, Standings]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubSamplingRule:
    """The rule of SS: the trials that deserve it most train until their next rung.

    Attributes:
        rungs: The epochs at which trials are compared.
        eta: Fewer than one in ``eta**r`` of the trials are trained to rung ``r`` because there is
            room; good ones always are.
        threshold: Observations that every trial gets in any case.
    """

    rungs: tuple[int, ...]
    eta: int
    threshold: Threshold

    def decide(
        self, history: History, standing: Standing, *, num: int | None, num_trials: int
    ) -> list[Proposal]:
        """Return at most ``num`` trials to train further, the most deserving first.

        Args:
            history: The history.
            standing: The standing of the trials that are compared.
            num: The most trials to return (default: all that deserve it).
            num_trials: The number of trials that a rung's places are a share of.
        """
        leader = standing.leader(history)
        if leader is None:
            return []
        deserving = self._deserving(history, standing, leader=leader, num_trials=num_trials)
        return [self._further(trial) for trial in islice(deserving, num)]

    def at_the_end(self, history: History, standing: Standing) -> list[Proposal]:
        """Return the challenger furthest ahead of the leader, if any is ahead.

        This is for the very end, when no trial deserves more and none is in training.
        """
        leader = standing.leader(history)
        if leader is None:
            return []
        others = standing.challengers(leader)
        entries = (_by_difference(others, epoch, leader) for epoch in others)
        behind, number = next(merge(*entries), (0.0, -1))
        return [self._further(history[number])] if behind < 0 else []

    def _further(self, trial: Trial) -> Proposal:
        target = self.rungs[_level(self.rungs, trial.reached)]
        return Proposal(target=target, trial=trial.number, group=trial.group)

    def _deserving(
        self, history: History, standing: Standing, *, leader: Trial, num_trials: int
    ) -> Iterator[Trial]:
        """Yield the trials to train further, the most deserving first, each of them once."""
        others = standing.challengers(leader)
        c = threshold(standing.num_observed, self.threshold)
        going: dict[int, int] = {}
        for epoch in sorted(epoch for epoch in others if epoch < c):
            going[epoch] = len(others[epoch])
            for _, number in _by_difference(others, epoch, leader):
                yield history[number]
        rest = [epoch for epoch in others if epoch not in going]
        tops = {epoch: leader.scores[epoch - 1] for epoch in rest}
        for epoch in rest:
            going[epoch] = len(others[epoch].good)
        for _, number in merge(*(ranked(others[e].good, top=tops[e]) for e in rest)):
            yield history[number]
        free = self._free(num_trials, standing, going)
        remaining = {epoch: ranked(others[epoch].rest, top=tops[epoch]) for epoch in rest}
        for _, number in self._within_quota(remaining, free):
            yield history[number]
        if leader.state == "waiting" and leader.reached < self.rungs[-1]:
            yield leader

    def _free(self, num_trials: int, standing: Standing, going: dict[int, int]) -> list[int]:
        """Return the free places in each rung after the trials in ``going`` (by epoch) move up."""
        free = [-(-num_trials // self.eta**level) for level in range(len(self.rungs))]
        for target, num in standing.targets.items():
            for level in range(_level(self.rungs, target)):
                free[level] -= num
        for epoch, num in going.items():
            free[_level(self.rungs, epoch)] -= num
        return free

    def _within_quota(
        self, rest: dict[int, Iterator[Entry]], free: Sequence[int]
    ) -> Iterator[Entry]:
        """Yield the entries of ``rest`` whose next rung has a free place, by difference."""
        heading = defaultdict[int, list[Iterator[Entry]]](list)
        for epoch, entries in rest.items():
            heading[_level(self.rungs, epoch)].append(entries)
        return merge(
            *(islice(merge(*heading[level]), free[level]) for level in heading if free[level] > 0)
        )


def _by_difference(others: dict[int, Challengers], epoch: int, leader: Trial) -> Iterator[Entry]:
    """Yield all trials that wait at an epoch, the one least behind the leader first."""
    top, both = leader.scores[epoch - 1], others[epoch]
    return merge(ranked(both.good, top=top), ranked(both.rest, top=top))


def _level(rungs: Sequence[int], epoch: int) -> int:
    """Return the number of rungs at or below ``epoch``, which is the index of the next rung."""
    return bisect_right(rungs, epoch)
