"""Several plans of one forest, each updated from what all drivers have written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.plan._drive import ref
from tests.plan.test_search_plan import EPOCHS, minimum, requests, timeline
from thrifty.core import CheckpointRef, EpochDone, StageDone
from thrifty.plan import Answer, SearchPlan
from thrifty.space import Timeline


pytestmark = pytest.mark.slow


@dataclass
class Log:
    """Records that the drivers have written, in order, and the claims on what they train."""

    nodes: list[Timeline] = field(default_factory=list)
    epochs: list[EpochDone] = field(default_factory=list)
    kept: list[CheckpointRef] = field(default_factory=list)
    claims: dict[int, tuple[int, tuple[int, int]]] = field(default_factory=dict)


class Party:
    """A driver with a plan of its own."""

    def __init__(self, number: int, log: Log, *, cuts=()) -> None:
        self.number = number
        self.plan = SearchPlan(cuts=cuts, keep_branches=True)
        self.log = log
        self.trained: Counter[tuple[int, int]] = Counter()
        self.answers: list[Answer] = []
        self._heard = [0, 0]
        self._held: Counter[int] = Counter()
        self._running: list[tuple[object, list]] = []

    def hear(self) -> None:
        log, (epochs, kept) = self.log, self._heard
        for known in log.nodes[len(self.plan.nodes) :]:
            self.plan.insert(known)
        self.answers += self.plan.learn(log.epochs[epochs:], log.kept[kept:])
        self._heard = [len(log.epochs), len(log.kept)]
        others = {n: span for n, (who, span) in log.claims.items() if who != self.number}
        self.plan.set_remote_running(others)

    def ask(self, trial, schedule, target) -> None:
        self.hear()
        node = self.plan.insert(timeline(schedule))
        self.log.nodes += [n.timeline for n in self.plan.nodes[len(self.log.nodes) :]]
        answer = self.plan.request((self.number, trial), node, target)
        self.answers += [] if answer is None else [answer]

    def take(self) -> bool:
        self.hear()
        chain = self.plan.next_chain()
        if chain is None:
            return False
        for stage in chain.stages:
            who, (start, _) = self.log.claims.get(stage.node, (self.number, (stage.start, 0)))
            assert who == self.number, "another driver trains it"
            self.log.claims[stage.node] = (self.number, (start, stage.stop))
        self._held.update({stage.node for stage in chain.stages})
        self._running.append((chain, list(chain.stages)))
        return True

    def advance(self) -> bool:
        if not self._running:
            return False
        chain, stages = self._running[0]
        stage = stages.pop(0)
        for epoch in range(stage.start + 1, stage.stop + 1):
            done = EpochDone(
                node=stage.node, epoch=epoch, metrics={"m": epoch}, seconds=0.0, worker=""
            )
            self.trained[stage.node, epoch] += 1
            self.answers += self.plan.record(done)
            self.log.epochs.append(done)
        kept = ref(stage.node, stage.stop)
        end = StageDone(
            node=stage.node, start=stage.start, stop=stage.stop, worker="", checkpoint=kept
        )
        self.plan.record(end)
        self.log.kept.append(kept)
        if not stages:
            self._running.pop(0)
            self.plan.abandon(chain)
            self._give_back(chain)
        return True

    def die(self) -> None:
        for chain, _ in self._running:
            self._give_back(chain)
        self._running = []

    def _give_back(self, chain) -> None:
        nodes = {stage.node for stage in chain.stages}
        self._held.subtract(nodes)
        for node in nodes:
            if not self._held[node]:
                del self.log.claims[node]


def run(parties) -> None:
    while True:
        moved = [party.take() | party.advance() for party in parties]
        if not any(moved):
            return


def interleaved(parties, asked, seed) -> None:
    """Interleave requests and work in random order."""
    rng = np.random.default_rng(seed)
    left = [list(enumerate(each)) for each in asked]
    while any(left):
        place = int(rng.integers(len(parties)))
        party = parties[place]
        step = int(rng.integers(3))
        if step == 0 and left[place]:
            trial, (schedule, target) = left[place].pop(0)
            party.ask(trial, schedule, target)
        elif step == 1:
            party.take()
        else:
            party.advance()


@given(st.lists(requests, min_size=2, max_size=3), st.integers(0, 100))
@settings(max_examples=draws(20, 80), deadline=None)
def test_each_epoch_is_trained_by_one(asked, seed):
    """With all branch points kept, no order of events trains anything twice."""
    log = Log()
    parties = [Party(n, log, cuts=range(1, EPOCHS)) for n in range(len(asked))]
    interleaved(parties, asked, seed)
    run(parties)
    trained = sum((party.trained for party in parties), Counter())
    assert set(trained.values()) == {1}
    assert len(trained) == minimum([each for some in asked for each in some])
    for party, some in zip(parties, asked, strict=True):
        assert sorted(a.trial[1] for a in party.answers) == list(range(len(some)))


@given(st.lists(requests, min_size=2, max_size=3), st.integers(0, 100))
@settings(max_examples=draws(20, 80), deadline=None)
def test_known_branch_points_are_kept_for_others(asked, seed):
    """A driver that asked before the work began loses nothing, though another driver trains."""
    log = Log()
    parties = [Party(n, log) for n in range(len(asked))]
    for party, some in zip(parties, asked, strict=True):
        for trial, (schedule, target) in enumerate(some):
            party.ask(trial, schedule, target)
    run(parties)
    trained = sum((party.trained for party in parties), Counter())
    assert len(trained) == minimum([each for some in asked for each in some])
    assert set(trained.values()) == {1}


@given(st.lists(requests, min_size=2, max_size=3), st.integers(0, 100), st.integers(0, 30))
@settings(max_examples=draws(20, 80), deadline=None)
def test_what_a_dead_driver_left_is_trained_by_the_others(asked, seed, steps):
    log = Log()
    parties = [Party(n, log, cuts=range(1, EPOCHS)) for n in range(len(asked))]
    for party, some in zip(parties, asked, strict=True):
        for trial, (schedule, target) in enumerate(some):
            party.ask(trial, schedule, target)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        party = parties[int(rng.integers(len(parties)))]
        party.take() if rng.random() < 0.5 else party.advance()
    parties[0].die()
    run(parties[1:])
    for party, some in zip(parties[1:], asked[1:], strict=True):
        assert sorted(a.trial[1] for a in party.answers) == list(range(len(some)))
