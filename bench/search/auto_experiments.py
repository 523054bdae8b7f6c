"""Experiments for ``Auto`` that failed; see docs/design/search.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from thrifty.search import CheckedASHA, Decision, History, Proposal
from thrifty.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneASHA(CheckedASHA):
    """``CheckedASHA`` where at most ``size`` trials in training are not among the best of a rung.

    With the lane ``"leader"``, the best trial that waits, at the last rung where any waits, goes on
    to the next rung. With ``"spot checks"``, the earliest trial that waits at the first rung goes
    on to its end, once another trial has come to its end.
    """

    lane: Literal["leader", "spot checks"]
    size: int = 1

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return a trial for the lane, if it has a place, before the decisions without it."""
        # Zero-argument ``super`` does not work in a dataclass with slots before Python 3.14.
        out = CheckedASHA.ask(self, history, space, num=num, rng=rng)
        on_lane = 0
        for trial in history:
            if trial.state == "running" and trial.reached:
                board = history.leaderboard(trial.reached)
                on_lane += board.rank((trial.scores[-1], trial.number)) >= len(board) // self.eta
        if not out or on_lane >= self.size:
            return out
        first = self._next(history, {each.trial for each in out})
        return out if first is None else [first, *out[: num - 1]]

    def _next(self, history: History, taken: set[int | None]) -> Proposal | None:
        steps = list(pairwise(self.rungs()[self.num_dropped(history) :]))
        if self.lane == "spot checks":
            if not steps or not history.leaderboard(self.max_epochs):
                return None
            numbers = [number for _, number in history.waiting(steps[0][0])]
            free = [number for number in numbers if number not in taken]
            return Proposal(target=self.max_epochs, trial=min(free)) if free else None
        for here, there in reversed(steps):
            for _, number in history.waiting(here):
                if number not in taken:
                    return Proposal(target=there, trial=number)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWaveASHA(CheckedASHA):
    """``CheckedASHA`` where no trial leaves the second rung before ``wave`` have come to it."""

    wave: int

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return decisions, with new trials in the places of promotions that come too early."""
        out = CheckedASHA.ask(self, history, space, num=num, rng=rng)
        second = self.rungs()[1]
        if not history.num_running or len(history.leaderboard(second)) >= self.wave:
            return out
        kept = [each for each in out if not _goes_on_from(history, second, each)]
        num_new = min(len(out) - len(kept), self.num_trials - len(history))
        if num_new <= 0:
            return kept
        configs = self.sampler.sample(history, space, num=num_new, rng=rng)
        first = self.rungs()[self.num_dropped(history)]
        return [*kept, *(Proposal(target=first, config=config) for config in configs)]


def _goes_on_from(history: History, epoch: int, decision: Decision) -> bool:
    return decision.trial is not None and history[decision.trial].reached == epoch
