"""The search plan: known, requested and running training for one task and seed.

The plan holds no files and no tensors. Inserting the same timelines in the same order rebuilds it.

References:
    Shin et al., "Hippo: Taming Hyper-parameter Optimization of Deep Learning with Stage Trees",
    PVLDB 15(5), 2022.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from thrifty.core import CheckpointLost, CheckpointRef, EpochDone, Event, StageDone, StageFailed
from thrifty.space import BranchInterval, Timeline

from ._stages import Agenda, Answer, Chain, Node


MAX_ATTEMPTS = 3
"""How often a stage may lose its worker after the same epoch before its trials fail.

A stage that crashes its worker does so at the same place each time. One that comes to different
epochs was hit by something else.
"""
MAX_LOSSES = 10
"""How often a stage may lose its worker, at any epochs, before its trials fail."""
MAX_EVICTIONS = 30
"""How often a stage may lose its worker's machine before its trials fail.

An eviction is hardly ever the stage's fault, but a stage that kills machines must not do so
forever.
"""

_TRIES = {
    "diverged": 1,
    "error": 1,
    "task": 1,
    "timeout": 1,
    "lost": MAX_LOSSES,
    "evicted": MAX_EVICTIONS,
}
"""How often a stage may fail in each way before its trials fail; other ways have no limit."""


def _unit_cost(config: Mapping[str, Any]) -> float:  # noqa: ARG001 (every epoch costs the same)
    return 1.0


class SearchPlan:
    """A tree in which equal prefixes of timelines are one node, so that they are trained once.

    ``cuts`` and ``intervals`` say where the search space may branch: training keeps the states that
    it passes there. ``cost`` gives the seconds of one epoch under a configuration.
    ``keep_branches`` also keeps the states at all known branch points that no trial of this driver
    waits for, because another driver of the plan may need them.

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
        """Epochs that all requests so far need, each shared epoch counted once."""
        self.num_epochs_done = 0
        """Epochs whose metrics are known."""
        self._cost = cost
        self._roots: dict[Hashable, Node] = {}
        self._agenda = Agenda(
            self.nodes, cuts=cuts, intervals=intervals, keep_branches=keep_branches
        )
        self._attempts: Counter[tuple[int, int, str]] = Counter()
        """Failures by node, start of the stage and kind."""
        self._losses: Counter[tuple[int, int, int]] = Counter()
        """Lost workers by node, start of the stage and last epoch that was reached."""
        self._elsewhere: dict[int, tuple[int, int]] = {}
        """Spans that other drivers are training, by node."""

    @property
    def longest_pending(self) -> float:
        """Cost of the longest path of work that can start now: an upper bound, never too low."""
        return self._agenda.longest

    # -- requests ---------------------------------------------------------------------

    def insert(self, timeline: Timeline) -> int:
        """Return the id of the node that a timeline ends on; create the node if needed.

        The search walks from the root as long as values agree. If they diverge within a node, that
        node is not split: the new node records where it branches off.
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
        """Request a trial's metrics after ``epoch`` epochs; return the answer if it is known."""
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
        """Count an epoch as requested without scheduling work; return the node that owns it."""
        node = self.owner(node_id, epoch)
        self._note_farthest(node, epoch)
        return node

    def forget_requests(self) -> None:
        """Reset the count of requested epochs but keep the nodes.

        Only for a plan on which nothing was trained or is pending.
        """
        self.num_epochs_needed = 0
        for node in self.nodes:
            node.farthest = node.start

    def release(self, trial: Hashable, node_id: int, epoch: int) -> None:
        """Withdraw a trial's request; work that other trials still need goes on."""
        node = self.owner(node_id, epoch)
        trials = node.waiting.get(epoch)
        if trials is None:
            return
        trials.discard(trial)
        if not trials:
            del node.waiting[epoch]
            self._agenda.settle(node)

    def is_wanted(self, chain: Chain) -> bool:
        """Return whether a trial still waits for a result or a state of a running chain."""
        return any(self.nodes[stage.node].wants() for stage in chain.stages)

    # -- known results ----------------------------------------------------------------

    def owner(self, node_id: int, epoch: int) -> Node:
        """Return the node on the path to ``node_id`` that holds the state after ``epoch``."""
        node = self.nodes[node_id]
        while epoch <= node.start and node.parent is not None:
            node = node.parent
        return node

    def curve(self, node_id: int, epoch: int) -> list[Mapping[str, float]]:
        """Return the metrics after epochs ``1 .. epoch`` along the path to a node."""
        out: list[Mapping[str, float]] = []
        node: Node | None = self.owner(node_id, epoch)
        while node is not None:
            out.extend(node.metrics[e] for e in range(epoch, node.start, -1))
            epoch, node = node.start, node.parent
        return out[::-1]

    def may_branch(self, node: Node, epoch: int) -> bool:
        """Return whether the search space may branch off a node at an epoch."""
        return epoch in self._agenda.cuts(node, epoch - 1, stop=epoch)

    def checkpoints(self) -> Iterator[CheckpointRef]:
        """Return all checkpoints of the plan."""
        return (ref for node in self.nodes for ref in node.checkpoints.values())

    # -- other drivers ----------------------------------------------------------------

    def learn(self, epochs: Sequence[EpochDone], kept: Sequence[CheckpointRef]) -> list[Answer]:
        """Record what other drivers have trained; return the answers to requests it settles."""
        answers = [answer for event in epochs for answer in self._epoch_done(event)]
        for ref in kept:
            self.restore(ref)
        for node_id in {event.node for event in epochs}:
            self._agenda.settle(self.nodes[node_id])
        return answers

    def set_remote_running(self, spans: Mapping[int, tuple[int, int]]) -> None:
        """Set what other drivers are training now; this driver does not train these nodes.

        ``spans`` gives the first and the last epoch by node.
        """
        for node_id in self._elsewhere.keys() - spans.keys():
            self._set_running(node_id, None)
        for node_id, span in spans.items():
            self._set_running(node_id, span)
        self._elsewhere = dict(spans)

    def _set_running(self, node_id: int, span: tuple[int, int] | None) -> None:
        node = self.nodes[node_id]
        node.running = span
        self._agenda.settle(node)

    # -- training ---------------------------------------------------------------------

    def next_chain(self) -> Chain | None:
        """Return the critical-path stages that a worker can start now; mark them as running."""
        return self._agenda.pop()

    def abandon(self, chain: Chain) -> None:
        """Release a chain that its worker no longer trains; its remaining work is pending again."""
        spans: dict[int, tuple[int, int]] = {}
        for stage in chain.stages:
            spans[stage.node] = (spans.get(stage.node, (stage.start, 0))[0], stage.stop)
        for node_id, span in reversed(spans.items()):
            node = self.nodes[node_id]
            if node.running == span:  # otherwise another worker continues with this node
                node.running = None
                self._agenda.settle(node)

    def record(self, event: Event) -> list[Answer]:
        """Record an event; return the answers to the requests that it settles."""
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
        """Record a checkpoint that was kept before this process began.

        Training can continue from it, unless it comes from another plan and its epoch has not been
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
        """Forget a checkpoint; if a trial still needs its state, it is trained again."""
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
        if self._is_tried_again(event):
            self._agenda.settle(node)
            return []
        node.failed_at, node.failure = event.epoch + 1, failure
        # The last epoch may be known and yet have no state, such as if it cannot be stored.
        node.stateless_at = event.epoch if event.epoch == event.stop else event.epoch + 1
        answers = self._fail_beyond(node, event.epoch, failure)
        self._agenda.settle(node)
        return answers

    def _is_tried_again(self, event: StageFailed) -> bool:
        """Count a failure, and return whether its stage has tries left."""
        key = (event.node, event.start, event.kind)
        self._attempts[key] += 1
        if self._attempts[key] >= _TRIES.get(event.kind, math.inf):
            return False
        if event.kind != "lost":
            return True
        reached = event.epoch if event.reached is None else event.reached
        place = (event.node, event.start, reached)
        self._losses[place] += 1
        return self._losses[place] < MAX_ATTEMPTS

    def _fail_beyond(self, node: Node, epoch: int, failure: tuple[str, str, str]) -> list[Answer]:
        """Fail every request that needs training beyond ``epoch`` of a node."""
        answers: list[Answer] = []
        stack = [(node, epoch)]
        assert node.stateless_at is not None
        while stack:
            at, limit = stack.pop()
            for target in sorted(e for e in at.waiting if e > limit):
                answers.extend(
                    Answer(trial=trial, epoch=target, failure=failure)
                    for trial in sorted(at.waiting.pop(target), key=repr)
                )
            least = node.stateless_at if at is node else limit + 1
            stack.extend((c, c.start) for (start, _), c in at.children.items() if start >= least)
            if at is not node:
                self._agenda.settle(at)
        return answers

    def _failure(self, node: Node, epoch: int) -> tuple[str, str, str] | None:
        """Return why an epoch of a node cannot be trained; None if it can."""
        if node.failed_at is not None and epoch >= node.failed_at:
            return node.failure
        start, at = node.start, node.parent
        while at is not None:  # each of these has to give the state that training goes on from
            if at.stateless_at is not None and start >= at.stateless_at:
                return at.failure
            start, at = at.start, at.parent
        return None

    def _note_farthest(self, node: Node, epoch: int) -> None:
        at: Node | None = node
        while at is not None and epoch > at.farthest:
            self.num_epochs_needed += epoch - at.farthest
            at.farthest = epoch
            epoch = at.start
            at = at.parent


def _parting(a: Timeline, b: Timeline) -> tuple[int, Hashable | None]:
    """Return the epoch where ``b`` diverges from ``a`` and its key there (None: it never does)."""
    mine, theirs = a.runs, b.runs
    for index, (p, q) in enumerate(zip(mine, theirs, strict=False)):
        if p.key != q.key:
            return q.start, q.key
        if p.stop < q.stop:
            # The same piece continues where the other timeline ends or changes.
            return p.stop, q.key
        if q.stop < p.stop:
            if index + 1 == len(theirs):
                return b.epochs, None
            return q.stop, theirs[index + 1].key
    if len(theirs) > len(mine):
        return theirs[len(mine)].start, theirs[len(mine)].key
    return b.epochs, None
