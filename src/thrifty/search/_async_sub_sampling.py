"""Asynchronous sub-sampling."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby, islice, repeat
from operator import attrgetter

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History, Proposal, Trial
from ._rungs import rungs_between
from ._samplers import RandomSampler, Sampler
from ._sub_samples import Threshold, bar, check_threshold, gap, threshold, total


Stages = Counter[tuple[int, int, str]]
"""How many trials there are of each ``(reached, target, state)``: all that is counted is counted over these few."""

Entry = tuple[float, int]
"""``(score, trial)`` as on a leaderboard, or ``(behind, trial)``: by how much the leader's score is higher."""

_STAGE = attrgetter("reached", "target", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSubSampling(Algorithm):
    """Sub-sampling that never waits: a free worker trains whoever deserves it most, by one rung.

    After SS of Huang et al., "Bandit evaluation by sub-samples", MLSys 2022, without its rounds. The leader is the best
    of those trained longest; its challengers wait with fewer epochs. Who goes on, in this order:

    1. challengers with fewer epochs than the ``threshold`` (see ``SubSampling``), the least trained first;
    2. those who are good against the leader, by difference at the last epoch that both have reached;
    3. the others by difference, while fewer than one in ``eta**r`` (rounded up) of the trials so far were asked to reach rung ``r``;
    4. the leader;
    5. a new trial.

    Ties go to the earlier trial. Trials in training count for the quotas, and are compared by what they have reported.
    Nobody is stopped. At the very end whoever is ahead of the leader where both have been is trained on as well. With
    the default threshold and ``min_epochs=1`` every trial reaches the second rung.

    >>> AsyncSubSampling(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)

    Raises:
        AlgorithmError: an option is out of its range.
    """

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    threshold: Threshold = "sqrt-log"
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        check_counts(self, num_trials=self.num_trials)
        check_halving(
            self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs
        )
        check_threshold(self, self.threshold)
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """The epochs at which trials are compared; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """At most ``num`` trials to train on, or new ones."""
        rungs = self.rungs()
        stages: Stages = Counter(map(_STAGE, history))
        leader = _leader(history, stages)
        deserving = self._deserving(history, stages, leader) if leader else ()
        out: list[Decision] = [
            Proposal(target=rungs[_level(rungs, trial.reached)], trial=trial.number)
            for trial in islice(deserving, num)
        ]
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if leader and not out and not history.num_running:
            return self._ahead(history, stages, leader)
        return out

    def _deserving(self, history: History, stages: Stages, leader: Trial) -> Iterator[Trial]:
        """Trials to be trained on, those who deserve it most first; each of them once."""
        # who failed has been observed all the same
        observed = sum(
            num * (target if state == "failed" else reached)
            for (reached, target, state), num in stages.items()
        )
        c = threshold(observed, self.threshold)
        going: dict[int, Sequence[Entry]] = {}
        others = _challengers(history, stages, leader)
        for epoch in sorted(epoch for epoch in others if epoch < c):
            going[epoch] = others.pop(epoch)
            for _, number in _ranked(going[epoch], leader.scores[epoch - 1]):
                yield history[number]
        rest: dict[int, Sequence[Entry]] = {}
        for epoch, entries in others.items():
            going[epoch], rest[epoch] = _split(history, entries, bar(leader.scores, epoch))
        good = [_ranked(going[epoch], leader.scores[epoch - 1]) for epoch in rest]
        for _, number in merge(*good):
            yield history[number]
        free = self._free(history, stages, going)
        for _, number in self._within_quota(rest, free, leader):
            yield history[number]
        if leader.state == "waiting" and leader.reached < self.max_epochs:
            yield leader

    def _free(
        self, history: History, stages: Stages, going: dict[int, Sequence[Entry]]
    ) -> list[int]:
        """How many places each rung has left when ``going`` have gone to theirs."""
        rungs = self.rungs()
        free = [-(-len(history) // self.eta**level) for level in range(len(rungs))]
        for (_, target, _), num in stages.items():
            for level in range(_level(rungs, target)):
                free[level] -= num
        for epoch, entries in going.items():
            free[_level(rungs, epoch)] -= len(entries)
        return free

    def _within_quota(
        self, rest: dict[int, Sequence[Entry]], free: Sequence[int], leader: Trial
    ) -> Iterator[Entry]:
        """Those of ``rest`` whose next rung has a free place, by difference."""
        rungs = self.rungs()
        heading = defaultdict[int, list[Iterator[Entry]]](list)
        for epoch, entries in rest.items():
            heading[_level(rungs, epoch)].append(_ranked(entries, leader.scores[epoch - 1]))
        return merge(
            *(
                islice(merge(*heading[level]), free[level])
                for level in heading
                if free[level] > 0
            )
        )

    def _ahead(self, history: History, stages: Stages, leader: Trial) -> list[Decision]:
        """At the very end: the challenger that is ahead of the leader by most, if any is."""
        rungs, others = self.rungs(), _challengers(history, stages, leader)
        ranked = (_ranked(others[epoch], leader.scores[epoch - 1]) for epoch in others)
        behind, number = next(merge(*ranked), (0.0, -1))
        if behind >= 0:
            return []
        return [Proposal(target=rungs[_level(rungs, history[number].reached)], trial=number)]


def _leader(history: History, stages: Stages) -> Trial | None:
    """The best of those who have reported most."""
    epoch = max((reached for reached, _, state in stages if state != "failed"), default=0)
    board = (history[number] for _, number in history.leaderboard(epoch))
    return next((trial for trial in board if trial.state != "failed"), None)


def _challengers(history: History, stages: Stages, leader: Trial) -> dict[int, Sequence[Entry]]:
    """Those who wait with less training than the leader's, by epoch; each time the best first."""
    # all trials are of group 0, whose boards these are
    epochs = {reached for reached, _, state in stages if state == "waiting"}
    return {epoch: history.waiting(epoch)[:] for epoch in epochs if epoch < leader.reached}


def _split(
    history: History, entries: Sequence[Entry], least: float
) -> tuple[list[Entry], list[Entry]]:
    """Those whose scores sum to ``least`` or more, and those whose do not."""
    good, rest = list[Entry](), list[Entry]()
    for entry in entries:
        (good if total(history[entry[1]].scores) >= least else rest).append(entry)
    return good, rest


def _ranked(entries: Iterable[Entry], top: float) -> Iterator[Entry]:
    """``(score, trial)``, best first, as ``(behind, trial)``, least behind ``top`` first; lazily.

    The order is the same, except that scores may differ where their rounded differences do not: such trials tie.
    """
    for behind, tied in groupby(entries, lambda entry: -gap(entry[0], top)):
        yield from sorted((behind, number) for _, number in tied)


def _level(rungs: Sequence[int], epoch: int) -> int:
    """How many rungs are at ``epoch`` or below it: the index of the next one."""
    return bisect_right(rungs, epoch)
