"""Asynchronous sub-sampling."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, repeat

import numpy as np

from thrifty.space import Space

from ._algorithm import Algorithm
from ._check import check_counts, check_halving
from ._draw import check_sampler, draw
from ._history import Decision, History, Proposal, Trial
from ._rungs import rungs_between
from ._samplers import RandomSampler, Sampler
from ._standing import Challengers, Entry, Standing, ranked
from ._sub_samples import Threshold, check_threshold, threshold


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
        rungs, standing = self.rungs(), Standing.of(history)
        leader = standing.leader(history)
        others = standing.challengers(leader) if leader else {}
        deserving = (
            self._deserving(history, standing, leader=leader, others=others) if leader else ()
        )
        out: list[Decision] = [
            Proposal(target=rungs[_level(rungs, trial.reached)], trial=trial.number)
            for trial in islice(deserving, num)
        ]
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if leader and not out and not history.num_running:
            return self._ahead(history, leader, others)
        return out

    def _deserving(
        self,
        history: History,
        standing: Standing,
        *,
        leader: Trial,
        others: dict[int, Challengers],
    ) -> Iterator[Trial]:
        """Trials to be trained on, those who deserve it most first; each of them once."""
        c = threshold(standing.num_observed, self.threshold)
        going: dict[int, int] = {}
        for epoch in sorted(epoch for epoch in others if epoch < c):
            going[epoch] = len(others[epoch])
            for _, number in _by_difference(others, epoch, leader):
                yield history[number]
        rest = [epoch for epoch in others if epoch not in going]
        tops = {epoch: leader.scores[epoch - 1] for epoch in rest}
        for epoch in rest:
            going[epoch] = len(others[epoch].good)
        for _, number in merge(*(ranked(others[e].good, top=tops[e]) for e in rest)):
            yield history[number]
        free = self._free(len(history), standing, going)
        remaining = {epoch: ranked(others[epoch].rest, top=tops[epoch]) for epoch in rest}
        for _, number in self._within_quota(remaining, free):
            yield history[number]
        if leader.state == "waiting" and leader.reached < self.max_epochs:
            yield leader

    def _free(self, num_trials: int, standing: Standing, going: dict[int, int]) -> list[int]:
        """How many places each rung has left when ``going`` (trials by epoch) have gone to theirs."""
        rungs = self.rungs()
        free = [-(-num_trials // self.eta**level) for level in range(len(rungs))]
        for target, num in standing.targets.items():
            for level in range(_level(rungs, target)):
                free[level] -= num
        for epoch, num in going.items():
            free[_level(rungs, epoch)] -= num
        return free

    def _within_quota(
        self, rest: dict[int, Iterator[Entry]], free: Sequence[int]
    ) -> Iterator[Entry]:
        """Those of ``rest`` whose next rung has a free place, by difference."""
        heading = defaultdict[int, list[Iterator[Entry]]](list)
        for epoch, entries in rest.items():
            heading[_level(self.rungs(), epoch)].append(entries)
        return merge(
            *(
                islice(merge(*heading[level]), free[level])
                for level in heading
                if free[level] > 0
            )
        )

    def _ahead(
        self, history: History, leader: Trial, others: dict[int, Challengers]
    ) -> list[Decision]:
        """At the very end: the challenger that is ahead of the leader by most, if any is."""
        rungs = self.rungs()
        entries = (_by_difference(others, epoch, leader) for epoch in others)
        behind, number = next(merge(*entries), (0.0, -1))
        if behind >= 0:
            return []
        return [Proposal(target=rungs[_level(rungs, history[number].reached)], trial=number)]


def _by_difference(
    others: dict[int, Challengers], epoch: int, leader: Trial
) -> Iterator[Entry]:
    """All that wait at an epoch, least behind the leader first."""
    top, both = leader.scores[epoch - 1], others[epoch]
    return merge(ranked(both.good, top=top), ranked(both.rest, top=top))


def _level(rungs: Sequence[int], epoch: int) -> int:
    """How many rungs are at ``epoch`` or below it: the index of the next one."""
    return bisect_right(rungs, epoch)
