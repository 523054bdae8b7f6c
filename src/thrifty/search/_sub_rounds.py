"""Rounds of sub-sampling among the trials of one group, replayed from the history."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from thrifty.core import AlgorithmError

from ._history import Decision, History, Leaderboard, Proposal, Trial
from ._rungs import best
from ._sorted_list import SortedList
from ._sub_samples import Threshold, check_threshold, difference, is_good, leader, threshold


Width = Literal["fixed", "literal"]
Levels = Literal["round", "trial"]


def check_rounds(
    owner: object, *, threshold: object, width: object, levels: object = "round"
) -> None:
    """Raise AlgorithmError unless the options of sub-sampling are known and compatible."""
    name = type(owner).__name__
    check_threshold(owner, threshold)
    if width not in get_args(Width):
        raise AlgorithmError(f"{name}(width={width!r}): give 'fixed' or 'literal'")
    if levels not in get_args(Levels):
        raise AlgorithmError(f"{name}(levels={levels!r}): give 'round' or 'trial'")
    if width == "fixed" and threshold != "sqrt-log":
        raise AlgorithmError(
            f"{name}(threshold={threshold!r}): rounds of fixed width explore by their width "
            "and have no threshold; "
            "leave it out, or give width='literal'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rule that decides which trials each round trains.

    No trial is ever out: a round may resume a trial that an earlier round left behind. ``rungs``
    are the epochs of the rounds. All trials of the group take part in the first round.
    """

    rungs: tuple[int, ...]
    eta: int
    threshold: Threshold = "sqrt-log"
    width: Width = "fixed"
    levels: Levels = "round"

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
        if not replay.scores:
            return {}
        first = self._leader(replay)
        if number >= len(self.rungs):
            # The rounds are over. The leader falls short of the end only after a failure, or if
            # each trial moves up by one rung of its own.
            unfinished = replay.epochs[first] < self.rungs[-1]
            return {first: self.rungs[-1]} if unfinished else {}
        return {k: self._target(replay.epochs[k], number) for k in self._best(replay, number)}

    def _leader(self, replay: _Replay) -> int:
        if self.width == "literal":
            replay.leader = leader(replay.scores, previous=replay.leader)
        else:
            replay.leader = max(replay.scores, key=replay.standing)
        return replay.leader

    def _best(self, replay: _Replay, number: int) -> list[int]:
        assert replay.leader is not None
        top = replay.scores[replay.leader]
        others = [k for k in replay.scores if k != replay.leader]
        if self.width == "literal":
            c = threshold(sum(replay.epochs.values()), self.threshold)
            return [k for k in others if is_good(replay.scores[k], top, c=c)] or [replay.leader]
        places = max(len(replay.trials) // self.eta**number, 1)
        board = Leaderboard(SortedList((-difference(replay.scores[k], top), k) for k in others))
        return [replay.leader, *(best(board, places - 1) if places > 1 else ())]

    def _target(self, reached: int, number: int) -> int:
        if self.levels == "round":
            return self.rungs[number]
        return next(rung for rung in self.rungs if rung > reached)


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
    leader: int | None = None

    @classmethod
    def of(cls, history: History, group: Hashable) -> _Replay:
        return cls(
            trials={k: history[k] for k in history.in_group(group)}, epochs={}, scores={}
        )

    def play(self, targets: dict[int, int]) -> bool:
        """Move trials to their targets; return whether all have reached them or failed."""
        for k, target in targets.items():
            trial = self.trials[k]
            self.epochs[k] = target
            if trial.reached >= target:
                self.scores[k] = trial.scores[:target]
            elif trial.state == "failed":
                self.scores.pop(k, None)
            else:
                return False
        return True

    def standing(self, k: int) -> tuple[int, float, int]:
        """Return a sort key: more epochs rank first, then a better score, then an earlier trial."""
        return len(self.scores[k]), self.scores[k][-1], -k
