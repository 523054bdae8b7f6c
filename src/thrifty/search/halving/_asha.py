"""ASHA, and the rungs that trials are promoted along."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, repeat

import numpy as np

from thrifty.search._algorithm import Algorithm, check_sampler, draw
from thrifty.search._history import Decision, History, Leaderboard, Proposal, Stop
from thrifty.search._option_checks import check_counts, check_halving
from thrifty.search.samplers import RandomSampler, Sampler
from thrifty.space import Space


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RungAlgorithm(Algorithm):
    """An algorithm that trains ``num_trials`` trials from rung to rung."""

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(self, num_trials=self.num_trials)
        check_halving(
            self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs
        )
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs at which trials are compared; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASHA(RungAlgorithm):
    """Asynchronous successive halving, which never waits for a rung to fill.

    A trial is promoted as soon as it is in the top ``1 / eta`` of its rung; otherwise a new trial
    starts (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020,
    algorithm 2). Trials that are not promoted are paused, and may be promoted later. At the very
    end, if no trial has reached ``max_epochs``, the best trial of the highest rung is trained to
    there. This matters only with few trials.

    >>> ASHA(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` promotions or new trials, promotions in high rungs first."""
        rungs = self.rungs()
        out: list[Decision] = []
        for here, there in reversed(list(pairwise(rungs))):
            out += self._promotions(history, (here, there), num=num - len(out))
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            return self._last_one(history, rungs)
        return out

    def _promotions(
        self, history: History, step: tuple[int, int], *, num: int
    ) -> list[Decision]:
        """Promote at most ``num`` trials that wait in the top ``1 / eta`` of a rung."""
        here, there = step
        board = history.leaderboard(here)
        num_top = len(board) // self.eta
        out: list[Decision] = []
        for entry in islice(history.waiting(here), max(num, 0)):
            if board.rank(entry) >= num_top:
                break  # trials come best first, so no later one is in the top
            out.append(Proposal(target=there, trial=entry[1]))
        return out

    def _last_one(self, history: History, rungs: tuple[int, ...]) -> list[Decision]:
        """Return the promotion that makes the study end with a fully trained trial, if possible."""
        if history.leaderboard(rungs[-1]).num_alive:
            return []
        for here, there in reversed(list(pairwise(rungs))):
            for _, number in history.waiting(here)[:1]:
                return [Proposal(target=there, trial=number)]
        return []
