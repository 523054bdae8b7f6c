"""Asynchronous successive halving (ASHA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History, Proposal
from ._rungs import rungs_between
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class ASHA(Algorithm):
    """Asynchronous successive halving, which never waits for a rung to fill.

    A trial is promoted as soon as it is in the top ``1 / eta`` of its rung; otherwise a new trial
    starts (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020,
    algorithm 2). Trials that are not promoted are paused, and may be promoted later. At the very
    end, if no trial has reached ``max_epochs``, the best trial of the highest rung is trained to
    there. This matters only with few trials.

    >>> ASHA(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

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
