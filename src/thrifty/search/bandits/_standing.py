"""Leaderboards and counts for sub-sampling without rounds, kept up to date with a history."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from weakref import WeakKeyDictionary

from thrifty.search._history import History, Trial
from thrifty.search._sorted_list import SortedList

from ._sub_sampling import bar, gap, total


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
