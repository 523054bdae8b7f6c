"""Sub-sampling (SS), a bandit that compares sub-samples of learning curves; BOSS; their variants.

The variants take rounds of fixed widths, alone and in brackets of equal width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.search.samplers._base_sampler import check_counts, check_halving
from thrifty.space import Space

from ._algorithm import Algorithm, check_sampler, draw
from ._halving import (
    Bracket,
    BracketAlgorithm,
    RungAlgorithm,
    best,
    brackets_of,
    fill_brackets,
    rungs_between,
    verdicts_by,
    why_other_rungs,
)
from ._history import Decision, History, Leaderboard, Proposal, SortedList, Trial
from ._sub_sampling_rule import (
    Standing,
    Standings,
    SubSamplingRule,
    Threshold,
    check_threshold,
    difference,
)
from .samplers import KDESampler, RandomForestSampler, RandomSampler, Sampler


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
        AlgorithmError: An option is out of range.

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
        max_epochs: Most epochs that a trial is trained.
        eta: Ratio between the epochs of successive rungs.
        num_trials: Number of trials; brackets repeat until all are drawn (default: as many brackets
            as Hyperband has).
        threshold: Observations that every trial gets in any case, see ``SubSampling``.
        sampler: The model.

    Raises:
        AlgorithmError: An option is out of range.

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


# -- rounds of fixed widths ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rule that decides which trials each round trains.

    No trial is ever out: a round may resume a trial that an earlier round left behind. ``rungs``
    are the epochs of the rounds. All trials of the group take part in the first round.
    """

    rungs: tuple[int, ...]
    eta: int

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
        replay = replay.able(self.rungs[min(number, len(self.rungs) - 1)])
        if not replay.scores:
            return {}
        first = self._leader(replay)
        if number >= len(self.rungs):
            # The rounds are over. The leader falls short of the end only after a failure.
            unfinished = replay.epochs[first] < self.rungs[-1]
            return {first: self.rungs[-1]} if unfinished else {}
        return dict.fromkeys(self._best(replay, first, number=number), self.rungs[number])

    def _leader(self, replay: _Replay) -> int:
        return max(replay.scores, key=replay.standing)

    def _best(self, replay: _Replay, first: int, *, number: int) -> list[int]:
        """Return the trials that round ``number`` trains, of which ``first`` leads."""
        top = replay.scores[first]
        others = [k for k in replay.scores if k != first]
        places = max(len(replay.trials) // self.eta**number, 1)
        board = Leaderboard(SortedList((-difference(replay.scores[k], top), k) for k in others))
        return [first, *(best(board, places - 1) if places > 1 else ())]


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

    @classmethod
    def of(cls, history: History, group: Hashable) -> _Replay:
        return cls(trials={k: history[k] for k in history.in_group(group)}, epochs={}, scores={})

    def play(self, targets: dict[int, int]) -> bool:
        """Move trials to their targets; return whether all have reached them or failed."""
        for k, target in targets.items():
            trial = self.trials[k]
            self.epochs[k] = target
            if trial.reached >= target:
                self.scores[k] = trial.scores[:target]
            elif trial.state in ("failed", "stopped"):
                self.scores.pop(k, None)
            else:
                return False
        return True

    def able(self, target: int) -> _Replay:
        """Return the group without the trials that a person has stopped before an epoch."""
        gone = {k for k, t in self.trials.items() if t.state == "stopped" and t.reached < target}
        return replace(self, scores={k: s for k, s in self.scores.items() if k not in gone})

    def standing(self, k: int) -> tuple[int, float, int]:
        """Return a sort key: more epochs rank first, then a better score, then an earlier trial."""
        return len(self.scores[k]), self.scores[k][-1], -k


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWidthSubSampling(RungAlgorithm):
    """A variant of SS in rounds of fixed widths, as in the authors' product code.

    ``SubSampling`` is SS as published. Here every round trains a fixed number of trials, and
    neither a threshold nor block means decide (vega, ssa.py; Huang et al., "Improving Model
    Training with Multi-fidelity Hyperparameter Evaluation", MLSys 2022). One observation is the
    score of one epoch. No trial is dropped for good.

    A first round trains all trials for ``min_epochs``. Then ``floor(log(max_epochs / min_epochs,
    eta))`` rounds follow, each once the one before is complete; the last one ends at
    ``max_epochs``. After the last round, if the leader has not reached ``max_epochs``, it is
    trained to there; if it fails, the next trial is.

    Round ``r`` trains ``num_trials // eta**r`` trials (at least one) to its rung. They are the
    leader, which is the best of the trials trained longest, and the next best by difference at the
    last epoch that both have reached. This costs as much as successive halving and keeps as many
    workers busy, but a trial left behind comes back when the others disappoint.

    Args:
        max_epochs: Most epochs that a trial is trained.
        num_trials: Number of trials.
        eta: Ratio between the epochs of successive rounds.
        min_epochs: Epochs of the first round.
        sampler: Source of the configurations.

    Raises:
        AlgorithmError: An option is out of range.

    >>> FixedWidthSubSampling(max_epochs=27, num_trials=27).rungs()
    (1, 3, 9, 27)
    """

    def why_not_longer(self, before: int) -> str:
        """Return why a longer training would be another one: its rounds depend on each other."""
        return Algorithm.why_not_longer(self, before)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the next round if one is due."""
        rounds = Rounds(rungs=self.rungs(), eta=self.eta)
        starts = repeat((0, rounds.rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return fresh or rounds.decide(history)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundsOfBrackets:
    """Rule for brackets that runs rounds of sub-sampling."""

    eta: int

    def decide(self, history: History, *, group: int, rungs: tuple[int, ...]) -> Sequence[Decision]:
        """Return the next round of a bracket if the one before is complete."""
        return Rounds(rungs=rungs, eta=self.eta).decide(history, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideBOSS(BracketAlgorithm):
    """A variant of BOSS: brackets of equal width, in rounds of fixed widths, and kernel densities.

    ``BOSS`` is the algorithm of the paper. Here all brackets are as wide as Hyperband's first, the
    rule within a bracket is that of ``FixedWidthSubSampling``, and the model is a ``KDESampler``.
    On tables of curves that do not cross, this takes fewer epochs or less time than the paper's
    brackets, which get narrower and start longer (``bench/results/search_*``).

    Brackets come one after the other, so that the sampler has learnt from the earlier ones; it is
    fitted once per bracket. Workers that would have to wait for a round to end start the next
    bracket. With a sampler that does not learn, all brackets are proposed at once. ``Trial.group``
    is the bracket.

    Args:
        max_epochs: Most epochs that a trial is trained.
        eta: Ratio between the epochs of successive rounds.
        num_trials: Number of trials; brackets repeat until all are drawn (default: as many brackets
            as Hyperband has).
        sampler: The model (``RandomForestSampler()`` is the one in the authors' code).

    Raises:
        AlgorithmError: An option is out of range.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in WideBOSS(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (9, (1, 3, 9)), (9, (1, 3, 9))]
    """

    sampler: Sampler = field(default_factory=KDESampler)

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets, all equally wide; with ``num_trials``, as many as it needs."""
        return brackets_of(
            self.max_epochs, eta=self.eta, num_trials=self.num_trials, ladder="widest"
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return the next rounds of complete brackets, or new trials of the next bracket."""
        brackets = self.brackets()
        return fill_brackets(
            brackets,
            verdicts_by(_RoundsOfBrackets(eta=self.eta), brackets, history),
            sampler=self.sampler,
            history=history,
            space=space,
            num=None,
            rng=rng,
        )
