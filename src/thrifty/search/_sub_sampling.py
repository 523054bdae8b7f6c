"""Sub-sampling (SS), a bandit that compares sub-samples of learning curves; BOSS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import ClassVar

import numpy as np

from thrifty.search.samplers._base_sampler import check_counts, check_halving
from thrifty.space import Space

from ._algorithm import Algorithm, check_sampler, draw
from ._halving import (
    Bracket,
    BracketAlgorithm,
    brackets_of,
    fill_brackets,
    rungs_between,
    why_other_rungs,
)
from ._history import Decision, History, Proposal
from ._sub_sampling_rule import Standing, Standings, SubSamplingRule, Threshold, check_threshold
from .samplers import RandomForestSampler, RandomSampler, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class SubSampling(Algorithm):
    """SS: a free worker trains the trial that deserves it most, by sub-samples of its scores.

    Huang et al., "Improving Model Training with Multi-fidelity Hyperparameter Evaluation", MLSys
    2022: the rule of the authors' manual (vega, algorithms/hpo.md, 6.4), with its threshold and
    block means, and asynchronous as in their version that keeps many devices busy. One observation
    is the score of one epoch. The leader is the best of the trials trained longest. Its challengers
    wait with fewer epochs. Trials continue in this order:

    1. challengers with fewer epochs than the ``threshold``, the least trained first. It is a number
    of epochs, or grows with the number ``n`` of epochs of all trials: ``log(n)`` for ``"log"``, its
    square root for ``"sqrt-log"``, as in the paper;
    2. challengers that are good against the leader, which means that their mean is no worse than
    that of the leader's worst block of as many epochs, by difference at the last epoch that both
    have reached;
    3. the other challengers by difference, while fewer than one in ``eta**r`` (rounded up) of the
    trials so far were asked to reach rung ``r``. The paper does not say who keeps workers busy if
    no trial is good; these quotas are those of ``ASHA``;
    4. the leader;
    5. a new trial.

    Ties go to the earlier trial. Trials in training count towards the quotas, and are compared by
    the scores that they have reported. No trial is stopped. At the very end, trials that are ahead
    of the leader where both have been are trained further as well. With the default threshold and
    ``min_epochs=1``, every trial reaches the second rung.

    Raises:
        AlgorithmError: an option is out of range.

    >>> SubSampling(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
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
        rule = SubSamplingRule(rungs=self.rungs(), eta=self.eta, threshold=self.threshold)
        standing = Standing.of(history)
        out: list[Decision] = [*rule.decide(history, standing, num=num, num_trials=len(history))]
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rule.rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            out += rule.at_the_end(history, standing)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BOSS(BracketAlgorithm):
    """Brackets of sub-sampling, and a model that proposes the configurations of the next bracket.

    Huang et al., "Improving Model Training with Multi-fidelity Hyperparameter Evaluation", MLSys
    2022, as the authors' code (vega, boss.py) describes it: the brackets are those of
    ``Hyperband``, the rule within a bracket is that of ``SubSampling``, and the model is a random
    forest, fitted once for each bracket. Once all trials of a bracket have been trained for its
    first rung, they go on without rounds. A worker for which no bracket has a trial starts the next
    bracket. With a sampler that does not learn, all brackets are proposed at once. ``Trial.group``
    is the bracket.

    On tables of curves, ``WideBOSS`` ties with it with one worker and takes less time with several.
    Where curves cross, this one is better (``bench/results/search_*``).

    Args:
        max_epochs: most epochs that a trial is trained.
        eta: ratio between the epochs of successive rungs.
        num_trials: number of trials; brackets repeat until all are drawn (default: as many brackets
            as Hyperband has).
        threshold: observations that every trial gets in any case, see ``SubSampling``.
        sampler: the model.

    Raises:
        AlgorithmError: an option is out of range.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in BOSS(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (5, (3, 9)), (3, (9,))]
    """

    threshold: Threshold = "sqrt-log"
    sampler: Sampler = field(default_factory=RandomForestSampler)

    def __post_init__(self) -> None:
        BracketAlgorithm.__post_init__(self)
        check_threshold(self, self.threshold)

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets, widest first; with ``num_trials``, as many as it needs."""
        return brackets_of(self.max_epochs, eta=self.eta, num_trials=self.num_trials)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return trials of the brackets to train further, or new trials of the next bracket."""
        brackets = self.brackets()
        rule = (self.max_epochs, self.eta, self.num_trials, self.threshold)
        standings = Standings.of(history, rule=rule)

        def verdicts(is_ready: Callable[[int], bool]) -> list[Decision]:
            found: list[Decision] = []
            for group in sorted(g for g in standings.changed if isinstance(g, int)):
                if len(found) >= num or not is_ready(group):
                    continue
                left = num - len(found)
                decisions = self._verdicts(
                    history, standings.by_group[group], brackets[group], group=group, num=left
                )
                if not decisions:
                    standings.changed.discard(group)
                found += decisions
            return found

        return fill_brackets(
            brackets,
            verdicts,
            sampler=self.sampler,
            history=history,
            space=space,
            num=None,
            rng=rng,
        )

    def _verdicts(
        self, history: History, standing: Standing, bracket: Bracket, *, group: int, num: int
    ) -> list[Proposal]:
        """Return at most ``num`` trials of a bracket that go on now."""
        if standing.running[bracket.epochs[0]]:
            return []
        rule = SubSamplingRule(rungs=bracket.epochs, eta=self.eta, threshold=self.threshold)
        num_trials = len(history.in_group(group))
        found = rule.decide(history, standing, num=num, num_trials=num_trials)
        if found or history.is_running(group):
            return found
        return rule.at_the_end(history, standing)
