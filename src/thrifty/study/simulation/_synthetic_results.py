"""Made-up results, and runs of an algorithm on them: for forecasts and simulations.

A forecast needs only what an algorithm decides, eight times in seconds. ``MadeUpRun`` therefore
makes the decisions of a simulation on one worker without its clock, its events and its records.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import numpy as np

from thrifty.core import derive_seed
from thrifty.plan import SearchPlan
from thrifty.search import Algorithm, History, Proposal, next_decisions
from thrifty.space import Config, Space, Timeline
from thrifty.space._timeline import key_without_replica
from thrifty.study._loop import ask_rng


_HALF_WAY = 5.0
"""Progress (at most 1 per epoch) at which a score is half way to its limit."""
OWN_SHARE = 0.2
"""The share of a replica's speed that its seed determines, not its values."""


def made_up_scores(timeline: Timeline, start: int, stop: int, *, seed: int) -> list[float]:
    """Return made-up scores after epochs ``start + 1 .. stop``: above 0, below 1 and increasing.

    The values of the hyper-parameters in an epoch determine how fast the score improves: the speed
    is random, but always the same for the same values. A score depends only on the epochs so far,
    so timelines with a common prefix agree there. Replicas after the first have a fifth of their
    speed to themselves.

    >>> from thrifty.space import Constant, Step
    >>> one, other = (Timeline({"lr": lr}, epochs=9) for lr in (Constant(0.1), Step(0.1, [3])))
    >>> [
    ...     a == b
    ...     for a, b in zip(
    ...         made_up_scores(one, 0, 5, seed=0), made_up_scores(other, 0, 5, seed=0), strict=True
    ...     )
    ... ]
    [True, True, True, False, False]
    """
    scores: list[float] = []
    before = 0.0
    for run in timeline.runs:
        if run.start >= stop:
            break
        speed = _speed(run.key, seed)
        if timeline.replica:
            values = key_without_replica(run, replica=timeline.replica)
            speed = (1 - OWN_SHARE) * _speed(values, seed) + OWN_SHARE * speed
        for epoch in range(max(run.start, start) + 1, min(run.stop, stop) + 1):
            progress = before + (epoch - run.start) * speed
            scores.append(progress / (progress + _HALF_WAY))
        before += (run.stop - run.start) * speed
    return scores


@lru_cache(maxsize=65536)
def _speed(values: Hashable, seed: int) -> float:
    return derive_seed(seed, "speed", repr(values)) / 2**63


NUM_OWN_DRAWS = 1000
"""Configurations that each run draws itself; later ones repeat the first run's draws.

Drawing them again hardly changes the mean but would take longer than everything else.
"""
SHARE_AT_ONCE = 0.01
"""Largest share of the trials so far that an adaptive algorithm is asked for at once.

It is asked as if by that many workers.
"""


class MadeUpRun:
    """Runs of an algorithm on made-up results, one after the other, all on one plan.

    Nodes of the plan stay from one run to the next, so drawing a configuration again costs nothing.
    The plan's counts restart each time.

    >>> from thrifty.search import SuccessiveHalving
    >>> from thrifty.space import Float
    >>> run = MadeUpRun(SuccessiveHalving(max_epochs=9, num_trials=9), Space(lr=Float(0.1, 1.0)))
    >>> run.play(History(max_epochs=9))
    >>> sorted(trial.reached for trial in run.history), run.plan.num_epochs_needed
    ([1, 1, 1, 1, 1, 1, 3, 3, 9], 21)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        space: Space,
        *,
        num_metrics: int = 1,
        seed: int = 0,
        num_seeds: int = 1,
    ) -> None:
        self.plan = SearchPlan()
        self.history = History()
        """The history of the last run."""
        self.nodes_of: list[tuple[int, ...]] = []
        """The nodes that the timelines of each trial's replicas end on, by trial number."""
        self._scores: list[tuple[float, ...]] = []
        """The scores of each trial so far; a ``Trial`` of the history is slower to make."""
        self._algorithm = algorithm
        self._space = _RepeatedDraws(space)
        self._num_metrics = num_metrics
        self._seed = seed
        self._num_seeds = num_seeds
        self._seeds: list[int] = []
        """The seed of each metric's scores in the last run."""
        self._num_runs = 0
        self._known: dict[int, tuple[Config, tuple[int, ...]]] = {}
        """Configurations of the first run and their nodes, by identity."""

    @property
    def trial_epochs(self) -> int:
        """Epochs that the trials of the last run have reached, each trial counted separately."""
        return self._num_seeds * sum(map(len, self._scores))

    def play(self, history: History) -> None:
        """Run the algorithm to the end on a history without trials.

        All runs draw from the same streams, but each has results of its own. Those of the first are
        what a simulation with this seed makes up.
        """
        self.plan.forget_requests()
        self._space.begin(first=not self._num_runs)
        self.history, self.nodes_of, self._scores = history, [], []
        names = [(run, metric) for run in [self._num_runs] for metric in range(self._num_metrics)]
        self._seeds = [
            derive_seed(self._seed, "results", *name) if any(name) else self._seed for name in names
        ]
        while decisions := next_decisions(
            self._algorithm,
            history,
            self._space,
            num=max(1, int(SHARE_AT_ONCE * len(history))),
            rng=ask_rng(self._seed, history),
        ):
            numbers = [history.record_decision(decision) for decision in decisions]
            for number, decision in zip(numbers, decisions, strict=True):
                if isinstance(decision, Proposal):
                    if decision.config is not None:
                        self.nodes_of.append(self._insert(decision.config, decision.horizon))
                        self._scores.append(())
                    self._train(number, decision.target)
        self._num_runs += 1

    def _insert(self, config: Config, horizon: int | None) -> tuple[int, ...]:
        """Return the nodes of a new trial's replicas."""
        if id(config) in self._known:
            return self._known[id(config)][1]
        epochs = self._algorithm.max_epochs if horizon is None else horizon
        nodes = tuple(
            self.plan.insert(Timeline(config, epochs=epochs, replica=replica))
            for replica in range(self._num_seeds)
        )
        if not self._num_runs:
            self._known[id(config)] = config, nodes
        return nodes

    def _train(self, number: int, target: int) -> None:
        """Move a trial to its target."""
        nodes = [self.plan.note(each, target) for each in self.nodes_of[number]]
        node = nodes[0]
        first, *others = self._seeds
        before = self._scores[number]
        scores = made_up_scores(node.timeline, len(before), target, seed=first)
        self._scores[number] = before = (*before, *scores)
        further = [
            made_up_scores(node.timeline, target - 1, target, seed=other)[0] for other in others
        ]
        errors: tuple[float, ...] = ()
        if self._num_seeds > 1:
            last = [
                made_up_scores(each.timeline, target - 1, target, seed=first)[0] for each in nodes
            ]
            # Rungs look at the target alone, so the other epochs need no means and no errors.
            self._scores[number] = before = (*before[:-1], fmean(last))
            errors = (0.0,) * (target - 1) + (stdev(last) / math.sqrt(self._num_seeds),)
        self.history.record_scores(
            number, before, objectives=[before[-1], *further], standard_errors=errors
        )


class _RepeatedDraws(Space):
    """A space that repeats the first run's draws, except for the first ones."""

    def __init__(self, space: Space) -> None:
        vars(self).update(vars(space))
        self._origin = space
        self._kept: list[dict[str, Any]] = []
        """The first run's draws after ``NUM_OWN_DRAWS``."""
        self._num_drawn = 0
        self._is_first = True

    def begin(self, *, first: bool) -> None:
        """Begin the next run."""
        self._is_first = first
        self._num_drawn = 0

    def horizon_of(self, config: Config) -> int | None:
        """Return the epoch at which a configuration's training ends."""
        return self._origin.horizon_of(config)

    def sample(self, rng: np.random.Generator, *, levels: int | None = None) -> dict[str, Any]:
        """Draw one configuration."""
        place = self._num_drawn - NUM_OWN_DRAWS
        self._num_drawn += 1
        if not self._is_first and 0 <= place < len(self._kept):
            return self._kept[place]
        config = super().sample(rng, levels=levels)
        if self._is_first and place >= 0:
            self._kept.append(config)
        return config
