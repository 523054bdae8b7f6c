"""Asynchronous sub-sampling, and the leaderboards that it keeps up to date."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, repeat
from operator import itemgetter
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.search.samplers._base_sampler import check_counts, check_halving
from thrifty.space import Space

from ._algorithm import Algorithm, check_sampler, draw
from ._halving import rungs_between, why_other_rungs
from ._history import Decision, History, Proposal, SortedList, Trial
from ._sub_sampling import Threshold, bar, check_threshold, gap, threshold, total
from .samplers import RandomSampler, Sampler


Entry = tuple[float, int]
"""``(-score, trial)`` on a board, or ``(behind, trial)``: the leader's score minus the trial's."""


class Standing:
    """Counts and boards of one history; ``Standing.of`` reads the records since its last call.

    They depend on the history alone, however often ``Standing.of`` is called, and by which caller.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        """Number of epochs of all trials; those of a failed trial count up to its target."""
        self.targets: Counter[int] = Counter()
        """Number of trials last asked to reach each epoch."""
        self.waiting: dict[int, Challengers] = {}
        """Waiting trials, by epoch."""
        self._alive: dict[int, SortedList[Entry]] = {}
        """Trials that have not failed, by the last epoch that they have reported."""
        self._known: list[Trial | None] = []
        """Each trial as it was when last counted."""
        self._num_moves = 0

    @classmethod
    def of(cls, history: History) -> Standing:
        """Return the up-to-date standing of a history."""
        found = _KNOWN.get(history)
        if found is None:
            found = _KNOWN[history] = cls()
        found._catch_up(history)
        return found

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

    def _catch_up(self, history: History) -> None:
        self._known += [None] * (len(history) - len(self._known))
        moves = history.moves
        for number in moves[self._num_moves :]:
            before, now = self._known[number], history[number]
            if before is now:
                continue  # the trial changed several times, and its last state was already counted
            self._known[number] = now
            if before is not None:
                self._count(before, -1)
            self._count(now, 1)
        self._num_moves = len(moves)

    def _count(self, trial: Trial, change: int) -> None:
        failed = trial.state == "failed"
        self.targets[trial.target] += change
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


_KNOWN: WeakKeyDictionary[History, Standing] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSubSampling(Algorithm):
    """Sub-sampling without rounds: a free worker trains the most deserving trial by one rung.

    The algorithm follows SS of Huang et al., "Bandit evaluation by sub-samples", MLSys 2022, but
    has no rounds. The leader is the best of the trials trained longest. Its challengers wait with
    fewer epochs. Trials continue in this order:

    1. challengers with fewer epochs than the ``threshold``, the least trained first. It is a number
    of epochs, or grows with the number ``n`` of epochs of all trials: ``log(n)`` for ``"log"``, its
    square root for ``"sqrt-log"``;
    2. challengers that are good against the leader, by difference at the last epoch that both have
    reached;
    3. the other challengers by difference, while fewer than one in ``eta**r`` (rounded up) of the
    trials so far were asked to reach rung ``r``;
    4. the leader;
    5. a new trial.

    Ties go to the earlier trial. Trials in training count towards the quotas, and are compared by
    the scores that they have reported. No trial is stopped. At the very end, trials that are ahead
    of the leader where both have been are trained further as well. With the default threshold and
    ``min_epochs=1``, every trial reaches the second rung.

    Raises:
        AlgorithmError: an option is out of range.

    >>> AsyncSubSampling(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    threshold: Threshold = "sqrt-log"
    sampler: Sampler = field(default_factory=RandomSampler)
    can_grow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, num_trials=self.num_trials)
        check_halving(self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs)
        check_threshold(self, self.threshold)
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs at which trials are compared; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def why_not_longer(self, before: int) -> str:
        """Return why the rungs until ``before`` are others now; empty if they are the same."""
        return why_other_rungs(self, before, min_epochs=self.min_epochs, eta=self.eta)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` trials to train further, or new ones."""
        rungs, standing = self.rungs(), Standing.of(history)
        leader = standing.leader(history)
        others = standing.challengers(leader) if leader else {}
        deserving = (
            self._deserving(history, standing, leader=leader, others=others) if leader else ()
        )
        out: list[Decision] = [
            Proposal(target=rungs[_level(rungs, trial.reached)], trial=trial.number)
            for trial in islice(deserving, num)
        ]
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if leader and not out and not history.num_running:
            return self._ahead(history, leader, others)
        return out

    def _deserving(
        self, history: History, standing: Standing, *, leader: Trial, others: dict[int, Challengers]
    ) -> Iterator[Trial]:
        """Yield the trials to train further, the most deserving first, each of them once."""
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
        free = self._free(len(history), standing, going)
        remaining = {epoch: ranked(others[epoch].rest, top=tops[epoch]) for epoch in rest}
        for _, number in self._within_quota(remaining, free):
            yield history[number]
        if leader.state == "waiting" and leader.reached < self.max_epochs:
            yield leader

    def _free(self, num_trials: int, standing: Standing, going: dict[int, int]) -> list[int]:
        """Return the free places in each rung after the trials in ``going`` (by epoch) move up."""
        rungs = self.rungs()
        free = [-(-num_trials // self.eta**level) for level in range(len(rungs))]
        for target, num in standing.targets.items():
            for level in range(_level(rungs, target)):
                free[level] -= num
        for epoch, num in going.items():
            free[_level(rungs, epoch)] -= num
        return free

    def _within_quota(
        self, rest: dict[int, Iterator[Entry]], free: Sequence[int]
    ) -> Iterator[Entry]:
        """Yield the entries of ``rest`` whose next rung has a free place, by difference."""
        heading = defaultdict[int, list[Iterator[Entry]]](list)
        for epoch, entries in rest.items():
            heading[_level(self.rungs(), epoch)].append(entries)
        return merge(
            *(islice(merge(*heading[level]), free[level]) for level in heading if free[level] > 0)
        )

    def _ahead(
        self, history: History, leader: Trial, others: dict[int, Challengers]
    ) -> list[Decision]:
        """Return, at the very end, the challenger furthest ahead of the leader, if any is ahead."""
        rungs = self.rungs()
        entries = (_by_difference(others, epoch, leader) for epoch in others)
        behind, number = next(merge(*entries), (0.0, -1))
        if behind >= 0:
            return []
        return [Proposal(target=rungs[_level(rungs, history[number].reached)], trial=number)]


def _by_difference(others: dict[int, Challengers], epoch: int, leader: Trial) -> Iterator[Entry]:
    """Yield all trials that wait at an epoch, the one least behind the leader first."""
    top, both = leader.scores[epoch - 1], others[epoch]
    return merge(ranked(both.good, top=top), ranked(both.rest, top=top))


def _level(rungs: Sequence[int], epoch: int) -> int:
    """Return the number of rungs at or below ``epoch``, which is the index of the next rung."""
    return bisect_right(rungs, epoch)
