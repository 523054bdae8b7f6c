"""Rungs, and successive halving of the trials on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ._history import Decision, History, Leaderboard, Proposal, Stop


def rungs_between(min_epochs: int, max_epochs: int, *, eta: int) -> tuple[int, ...]:
    """Return ``min_epochs * eta**i``, with the last rung extended to ``max_epochs``.

    >>> rungs_between(1, 81, eta=3), rungs_between(1, 100, eta=3)
    ((1, 3, 9, 27, 81), (1, 3, 9, 27, 100))
    """
    rungs = [min_epochs]
    while rungs[-1] * eta <= max_epochs:
        rungs.append(rungs[-1] * eta)
    # The last rung is extended rather than followed by another: a rung shortly before the end would
    # decide little.
    return (*rungs[:-1], max_epochs)


def halve(
    history: History, rungs: Sequence[int], *, eta: int, group: Hashable = 0
) -> list[Decision]:
    """Return decisions on a complete rung: the best ``1 / eta`` continue, the others stop.

    A rung is complete when all trials have reached it or failed. Only waiting trials get a
    decision, so decisions that are in the history already are never repeated.
    """
    num_here = len(history.in_group(group))
    for here, there in pairwise(rungs):
        board = history.leaderboard(here, group=group)
        if len(board) < num_here:
            return []
        num_kept = min(max(num_here // eta, 1), board.num_alive)
        waiting = history.waiting(here, group=group)
        if waiting:
            kept = set(best(board, num_kept))
            return [
                Proposal(target=there, trial=number, group=group)
                if number in kept
                else Stop(trial=number)
                for _, number in waiting
            ]
        num_here = num_kept
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """Rule for brackets that applies ``halve``."""

    eta: int

    def decide(
        self, history: History, *, group: Hashable, rungs: Sequence[int]
    ) -> list[Decision]:
        """Return decisions on the first rung that is complete and not decided yet."""
        return halve(history, rungs, eta=self.eta, group=group)


def best(board: Leaderboard, num: int) -> list[int]:
    """Return the best ``num`` trials, spread evenly over the order of proposal among ties.

    Trials that share all their stages so far tie exactly, and often many of them do. Taking the
    earliest ones would keep neighbours in the grid, which differ least.

    >>> from thrifty.search import History, Proposal
    >>> history = History()
    >>> for trial in range(7):
    ...     _ = history.record_decision(Proposal(target=1, config={"lr": trial}))
    >>> for trial in range(7):
    ...     history.record_scores(trial, [1.0 if trial == 3 else 0.5])
    >>> best(history.leaderboard(1), 3)
    [3, 1, 5]
    """
    if num >= len(board):
        return [number for _, number in board]
    cut = board[num - 1][0]
    better = [number for score, number in board[:num] if score > cut]
    tied = [number for score, number in board[len(better) :] if score == cut]
    free = num - len(better)
    # Take the middle of each of ``free`` equal parts.
    return [*better, *(tied[(2 * i + 1) * len(tied) // (2 * free)] for i in range(free))]
