"""The search plan: what is known, asked for, and being trained, for one task and seed.

Shin et al., "Hippo: Taming Hyper-parameter Optimization of Deep Learning with Stage Trees", PVLDB 15(5), 2022.
Pure knowledge: no files, no tensors; a plan is rebuilt by inserting the same timelines in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from thrifty.core import (
    CheckpointLost,
    CheckpointRef,
    EpochDone,
    Event,
    StageDone,
    StageFailed,
)
from thrifty.space import BranchInterval, Timeline

from ._agenda import Agenda
from ._node import Node
from ._stage import Answer, Chain


MAX_ATTEMPTS = 3
"""How often a stage whose worker was lost is tried before its trials fail."""
MAX_EVICTIONS = 30
"""How often a stage may lose its worker's machine: hardly ever its fault, but one that ends machines must not do so for ever."""

_TRIES = {
    "diverged": 1,
    "error": 1,
    "task": 1,
    "timeout": 1,
    "lost": MAX_ATTEMPTS,
    "evicted": MAX_EVICTIONS,
}
"""How often a stage may fail in a way before its trials do; in other ways, any number of times."""


def _unit_cost(config: Mapping[str, Any]) -> float:  # noqa: ARG001 (every epoch costs the same)
    return 1.0


class SearchPlan:
    """A tree in which equal prefixes of timelines are one node, so that they are trained once.

    ``cuts`` and ``intervals`` say where the search space may branch: states are kept there whenever
    they are passed; ``cost`` gives the seconds of one epoch under a configuration. ``keep_branches`` keeps the states at all known branch
    points, too, though nobody here waits for them: another driver of the plan may.

    >>> from thrifty.space import Constant, Step
    >>> plan = SearchPlan()
    >>> for trial, lr in enumerate([Constant(0.1), Step(0.1, [30]), Step(0.1, [30, 60])]):
    ...     node = plan.insert(Timeline({"lr": lr}, epochs=90))
    ...     plan.request(trial, node, 90)
    >>> plan.num_epochs_needed  # 90 + 60 + 30, instead of 3 x 90
    180
    """

    def __init__(
        self,
        *,
        cuts: Sequence[int] = (),
        intervals: Sequence[BranchInterval] = (),
        cost: Callable[[Mapping[str, Any]], float] = _unit_cost,
        keep_branches: bool = False,
    ) -> None:
        self.nodes: list[Node] = []
        self.num_epochs_needed = 0
        """Epochs that all requests so far come to when each shared one is counted once."""
        self.num_epochs_done = 0
        """Epochs whose metrics are known."""
        self._cost = cost
        self._roots: dict[Hashable, Node] = {}
        self._agenda = Agenda(
            self.nodes, cuts=cuts, intervals=intervals, keep_branches=keep_branches
        )
        self._attempts: dict[tuple[int, int, str], int] = {}
        self._elsewhere: dict[int, tuple[int, int]] = {}
        """What others are training."""

    @property
    def longest_pending(self) -> float:
        """Cost of the longest path of work that could start now; never too low."""
        return self._agenda.longest

    # -- what is asked for ------------------------------------------------------------

    def insert(self, timeline: Timeline) -> int:
        """The node that a timeline ends on, made if there is none; its id.

        Walks from the root as long as values agree. Where they part within a node nothing is split: the new node just says
        where it branches off.
        """
        runs = timeline.runs
        root = self._roots.get(runs[0].key)
        if root is None:
            root = Node(
                len(self.nodes),
                origin=self._agenda.beginning,
                timeline=timeline,
                cost=self._cost(timeline.config),
            )
            self.nodes.append(root)
            self._roots[runs[0].key] = root
            return root.id
        node = root
        while True:
            epoch, key = _parting(node.timeline, timeline)
            if key is None:
                return node.id
            child = node.children.get((epoch, key))
            if child is None:
                child = Node(
                    len(self.nodes),
                    origin=node.point(epoch),
                    timeline=timeline,
                    cost=self._cost(timeline.config),
                )
                self.nodes.append(child)
                node.add_child(epoch, key, child)
                return child.id
            node = child

    def request(self, trial: Hashable, node_id: int, epoch: int) -> Answer | None:
        """A trial wants its metrics after ``epoch`` epochs; the answer, if it is known already."""
        node = self.owner(node_id, epoch)
        self._note_farthest(node, epoch)
        failure = self._failure(node, epoch)
        if failure is not None:
            return Answer(trial=trial, epoch=epoch, failure=failure)
        if epoch in node.metrics:
            return Answer(trial=trial, epoch=epoch, metrics=node.metrics[epoch])
        node.add_request(epoch, trial)
        self._agenda.demand(node, epoch)
        return None

    def note(self, node_id: int, epoch: int) -> Node:
        """Count an epoch as asked for, without anything to be done; returns the node that owns it."""
        node = self.owner(node_id, epoch)
        self._note_farthest(node, epoch)
        return node

    def forget_requests(self) -> None:
        """Count again from nothing; the nodes stay. For a plan on which nothing was trained or is pending."""
        self.num_epochs_needed = 0
        for node in self.nodes:
            node.farthest = node.start

    def release(self, trial: Hashable, node_id: int, epoch: int) -> None:
        """A trial no longer wants what it asked for; work that others still need goes on."""
        node = self.owner(node_id, epoch)
        trials = node.waiting.get(epoch)
        if trials is None:
            return
        trials.discard(trial)
        if not trials:
            del node.waiting[epoch]
            self._agenda.settle(node)

    # -- what is known ----------------------------------------------------------------

    def owner(self, node_id: int, epoch: int) -> Node:
        """The node on the path to ``node_id`` on which the state after ``epoch`` epochs lies."""
        node = self.nodes[node_id]
        while epoch <= node.start and node.parent is not None:
            node = node.parent
        return node

    def curve(self, node_id: int, epoch: int) -> list[Mapping[str, float]]:
        """The metrics after epochs ``1 .. epoch`` along the path to a node."""
        out: list[Mapping[str, float]] = []
        node: Node | None = self.owner(node_id, epoch)
        while node is not None:
            out.extend(node.metrics[e] for e in range(epoch, node.start, -1))
            epoch, node = node.start, node.parent
        return out[::-1]

    def may_branch(self, node: Node, epoch: int) -> bool:
        """Whether the search space may branch off a node at an epoch."""
        return epoch in self._agenda.cuts(node, epoch - 1, stop=epoch)

    def checkpoints(self) -> Iterator[CheckpointRef]:
        """All states that are kept."""
        return (ref for node in self.nodes for ref in node.checkpoints.values())

    # -- what others do ---------------------------------------------------------------

    def learn(self, epochs: Sequence[EpochDone], kept: Sequence[CheckpointRef]) -> list[Answer]:
        """Takes note of what others have trained; returns the requests that it settles."""
        answers = [answer for event in epochs for answer in self._epoch_done(event)]
        for ref in kept:
            self.restore(ref)
        for node_id in {event.node for event in epochs}:
            self._agenda.settle(self.nodes[node_id])
        return answers

    def occupy(self, spans: Mapping[int, tuple[int, int]]) -> None:
        """All that others are training now: by node the first and the last epoch; nobody here trains it meanwhile."""
        for node_id in self._elsewhere.keys() - spans.keys():
            self._set_running(node_id, None)
        for node_id, span in spans.items():
            self._set_running(node_id, span)
        self._elsewhere = dict(spans)

    def _set_running(self, node_id: int, span: tuple[int, int] | None) -> None:
        node = self.nodes[node_id]
        node.running = span
        self._agenda.settle(node)

    # -- what is trained --------------------------------------------------------------

    def next_chain(self) -> Chain | None:
        """The stages on the critical path that a worker can start now; they count as running."""
        return self._agenda.pop()

    def abandon(self, chain: Chain) -> None:
        """Whoever had a chain is through with it; what is left of it is open again."""
        spans: dict[int, tuple[int, int]] = {}
        for stage in chain.stages:
            spans[stage.node] = (spans.get(stage.node, (stage.start, 0))[0], stage.stop)
        for node_id, span in reversed(spans.items()):
            node = self.nodes[node_id]
            if node.running == span:  # otherwise another worker has gone on with this node
                node.running = None
                self._agenda.settle(node)

    def record(self, event: Event) -> list[Answer]:
        """Takes note of what happened; returns the requests that it settles."""
        if isinstance(event, EpochDone):
            return self._epoch_done(event)
        if isinstance(event, StageDone):
            self._stage_done(event)
        elif isinstance(event, StageFailed):
            return self._stage_failed(event)
        elif isinstance(event, CheckpointLost):
            self.drop(event.checkpoint)
        return []

    def restore(self, ref: CheckpointRef) -> None:
        """Take note of a state that was kept before this process began.

        Training can go on from it, unless it comes from another plan and its epoch is not
        evaluated yet.
        """
        node = self.nodes[ref.node]
        if ref.borrowed and ref.epoch not in node.metrics:
            node.add_kept(ref)
            return
        node.add_checkpoint(ref)
        self._agenda.settle(node)
        if ref.epoch in node.points:
            self._agenda.reopen(node.points[ref.epoch])

    def drop(self, ref: CheckpointRef) -> None:
        """Forget a state; a trial that still needs it has it trained again."""
        node = self.nodes[ref.node]
        node.kept.pop(ref.epoch, None)
        if node.checkpoints.pop(ref.epoch, None) is None:
            return
        point = node.points.get(ref.epoch)
        if point is not None and point.num_waiting:
            longest = max(self.nodes[i].longest for _, i in point.heap)
            self._agenda.demand(node, ref.epoch)
            node.longest = max(node.longest, (ref.epoch - node.start) * node.cost + longest)
        self._agenda.settle(node)

    def _epoch_done(self, event: EpochDone) -> list[Answer]:
        node = self.nodes[event.node]
        if event.epoch not in node.metrics:
            node.metrics[event.epoch] = event.metrics
            self.num_epochs_done += 1
        ref = node.kept.pop(event.epoch, None)
        if ref is not None:
            self.restore(ref)
        trials = node.waiting.pop(event.epoch, set())
        return [
            Answer(trial=trial, epoch=event.epoch, metrics=node.metrics[event.epoch])
            for trial in sorted(trials, key=repr)
        ]

    def _stage_done(self, event: StageDone) -> None:
        node = self.nodes[event.node]
        if node.running is not None and node.running[1] == event.stop:
            node.running = None
        if event.checkpoint is not None:
            node.add_checkpoint(event.checkpoint)
            if event.stop in node.points:
                self._agenda.reopen(node.points[event.stop])
        self._agenda.settle(node)

    def _stage_failed(self, event: StageFailed) -> list[Answer]:
        node = self.nodes[event.node]
        node.running = None
        failure = (event.kind, event.message, event.traceback)
        key = (event.node, event.start, event.kind)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] < _TRIES.get(event.kind, math.inf):
            self._agenda.settle(node)
            return []
        node.failed_at, node.failure = event.epoch + 1, failure
        answers = self._fail_beyond(node, event.epoch, failure)
        self._agenda.settle(node)
        return answers

    def _fail_beyond(
        self, node: Node, epoch: int, failure: tuple[str, str, str]
    ) -> list[Answer]:
        """Gives up every request that would have to pass beyond ``epoch`` of a node."""
        answers: list[Answer] = []
        stack = [(node, epoch)]
        while stack:
            at, limit = stack.pop()
            for target in sorted(e for e in at.waiting if e > limit):
                answers.extend(
                    Answer(trial=trial, epoch=target, failure=failure)
                    for trial in sorted(at.waiting.pop(target), key=repr)
                )
            stack.extend((c, c.start) for (start, _), c in at.children.items() if start > limit)
            if at is not node:
                self._agenda.settle(at)
        return answers

    def _failure(self, node: Node, epoch: int) -> tuple[str, str, str] | None:
        at: Node | None = node
        while at is not None:
            if at.failed_at is not None and epoch >= at.failed_at:
                return at.failure
            epoch = at.start
            at = at.parent
        return None

    def _note_farthest(self, node: Node, epoch: int) -> None:
        at: Node | None = node
        while at is not None and epoch > at.farthest:
            self.num_epochs_needed += epoch - at.farthest
            at.farthest = epoch
            epoch = at.start
            at = at.parent


def _parting(a: Timeline, b: Timeline) -> tuple[int, Hashable | None]:
    """Where ``b`` parts from ``a``, and what it does there (None: it never does)."""
    mine, theirs = a.runs, b.runs
    for index, (p, q) in enumerate(zip(mine, theirs, strict=False)):
        if p.key != q.key:
            return q.start, q.key
        if p.stop < q.stop:
            # the same piece goes on where the other one ends or changes
            return p.stop, q.key
        if q.stop < p.stop:
            if index + 1 == len(theirs):
                return b.epochs, None
            return q.stop, theirs[index + 1].key
    if len(theirs) > len(mine):
        return theirs[len(mine)].start, theirs[len(mine)].key
    return b.epochs, None
