"""The median stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._history import Decision, History, Proposal, Stop, Trial
from ._options import check_at_least, draw
from ._samplers import RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianStopping(Algorithm):
    """Stops a trial whose best score so far is below the median of the others' running averages.

    Golovin et al., "Google Vizier", KDD 2017, section 3.2.2. A trial is looked at every ``interval`` epochs, not before
    ``grace_epochs`` and not before ``min_trials`` others have come as far.
    """

    max_epochs: int
    num_trials: int
    grace_epochs: int = 1
    min_trials: int = 3
    interval: int = 1
    sampler: Sampler = RandomSampler()

    def __post_init__(self) -> None:
        check_at_least(
            1,
            max_epochs=self.max_epochs,
            num_trials=self.num_trials,
            grace_epochs=self.grace_epochs,
            min_trials=self.min_trials,
            interval=self.interval,
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Judges the trials that wait, then starts new ones; at most ``num`` go on or start."""
        decisions: list[Decision] = []
        num_on = 0
        for number in [trial.number for trial in history if trial.state == "waiting"]:
            if num_on == num:
                return decisions
            trial = history[number]
            if trial.reached >= self.max_epochs:
                continue
            if self._is_behind(history, trial):
                decisions.append(Stop(trial=number))
                continue
            target = min(trial.reached + self.interval, self.max_epochs)
            decisions.append(Proposal(target=target, trial=number))
            num_on += 1
        fresh = min(num - num_on, self.num_trials - len(history))
        first = min(max(self.grace_epochs, self.interval), self.max_epochs)
        return [
            *decisions,
            *draw(self.sampler, history, space, num=fresh, target=first, rng=rng),
        ]

    def _is_behind(self, history: History, trial: Trial) -> bool:
        at = trial.reached
        averages = [
            mean(other.scores[:at])
            for other in history
            if other.number != trial.number and other.reached >= at and other.state != "failed"
        ]
        if at < self.grace_epochs or len(averages) < self.min_trials:
            return False
        return max(trial.scores) < median(averages)
