"""The median stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts
from ._draw import check_sampler, draw
from ._history import Decision, History, Proposal, Stop
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianStopping(Algorithm):
    """Stops a trial whose best score so far is below the median of the others' average scores so far.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2. Trials are judged
    after ``grace_epochs`` and every ``interval`` epochs from then on, against the others that have come as far;
    while those are fewer than ``min_trials``, nobody is stopped.

    >>> MedianStopping(max_epochs=10, num_trials=20, grace_epochs=4, interval=3).checkpoints()
    (4, 7, 10)
    """

    max_epochs: int
    num_trials: int
    grace_epochs: int = 1
    min_trials: int = 5
    interval: int = 1
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(
            self,
            max_epochs=self.max_epochs,
            num_trials=self.num_trials,
            grace_epochs=self.grace_epochs,
            min_trials=self.min_trials,
            interval=self.interval,
        )
        if self.grace_epochs > self.max_epochs:
            raise AlgorithmError(
                f"MedianStopping(grace_epochs={self.grace_epochs}, max_epochs={self.max_epochs}): no trial would "
                "ever be judged; lower grace_epochs"
            )
        check_sampler(self, self.sampler)

    def checkpoints(self) -> tuple[int, ...]:
        """The epochs at which trials are judged, and ``max_epochs``."""
        return (*range(self.grace_epochs, self.max_epochs, self.interval), self.max_epochs)

    def ask(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Decision]:
        """All trials that are not in the history yet, and a verdict on each one that waits."""
        checkpoints = self.checkpoints()
        starts = repeat((0, checkpoints[0]), max(self.num_trials - len(history), 0))
        out: list[Decision] = []
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        for here, there in pairwise(checkpoints):
            out += self._verdicts(history, here, there)
        return out

    def _verdicts(self, history: History, here: int, there: int) -> list[Decision]:
        waiting = history.waiting(here)
        if not waiting:
            return []
        board = history.leaderboard(here)
        averages = {
            number: sum(history[number].scores[:here]) / here
            for _, number in board[: board.num_alive]
        }
        ascending = np.sort(np.fromiter(averages.values(), dtype=float))
        out: list[Decision] = []
        for _, number in waiting:
            others = np.delete(ascending, np.searchsorted(ascending, averages[number]))
            best = max(history[number].scores)
            judged = len(others) >= self.min_trials
            if judged and best < _median(others):
                out.append(Stop(trial=number))
            else:
                out.append(Proposal(target=there, trial=number))
        return out


def _median(ascending: np.ndarray) -> float:
    """The median of sorted numbers; unlike ``np.median`` it takes -inf (an epoch without a finite score)."""
    low, high = ascending[(len(ascending) - 1) // 2], ascending[len(ascending) // 2]
    return float(low if low == high else (low + high) / 2)
