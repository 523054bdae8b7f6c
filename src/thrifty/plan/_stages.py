"""Nodes and stages of the search plan, and the agenda: which chain the next idle worker gets.

The agenda schedules by the critical path. Hippo builds the stage forest anew at each decision; with
a hundred thousand pending stages that takes seconds. The agenda keeps only what a decision needs
and updates it as requests come in and stages end: the cost of the longest pending path that starts
at each node, and heaps of the places where training can start now. Outdated heap entries are never
searched for: they are detected when they reach the top. A cost can only turn out lower than its
heap entry says, so the first entry that is still correct is the longest path.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from thrifty.core import CheckpointRef
from thrifty.space import BranchInterval, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Epochs ``start + 1 .. stop`` of a node, with a checkpoint at the end.

    ``kept`` holds the states of epochs that another plan has trained. These epochs are not trained
    again: their states are loaded and evaluated.
    """

    node: int
    start: int
    stop: int
    kept: tuple[CheckpointRef, ...] = ()

    def kept_at(self, epoch: int) -> CheckpointRef | None:
        """Return the kept state after an epoch, or None if the epoch must be trained."""
        return next((ref for ref in self.kept if ref.epoch == epoch), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages that one worker trains in sequence; the model state stays on the worker.

    ``resume`` is the checkpoint from which the first stage starts (None: a fresh model). All stages
    lie on the path of ``timeline``.
    """

    stages: tuple[Stage, ...]
    timeline: Timeline
    resume: CheckpointRef | None = None

    @property
    def num_epochs(self) -> int:
        """The number of epochs in all stages."""
        return sum(stage.stop - stage.start for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a trial's request: ``metrics``, or a ``failure`` (kind, message, traceback)."""

    trial: Hashable
    epoch: int
    metrics: Mapping[str, float] | None = None
    failure: tuple[str, str, str] | None = None


class Point:
    """The state of a node at one epoch, as the place where other nodes branch off.

    ``heap`` holds ``(-longest, node id)`` of the children that need this state. Outdated entries
    stay in the heap until they are popped.
    """

    __slots__ = ("epoch", "heap", "node", "num_waiting", "queued")

    def __init__(self, node: Node | None, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self.heap: list[tuple[float, int]] = []
        self.num_waiting = 0
        self.queued = 0.0

    @property
    def available(self) -> bool:
        """Whether training can start here now: a checkpoint exists, or training begins here."""
        return self.node is None or self.epoch in self.node.checkpoints


class Node:
    """The epochs from ``start`` on that one timeline trains, and what is known about them.

    Epochs before ``start`` belong to its ancestors. A trial is a node and an epoch on it.
    Containers are created when first needed, because there may be a million nodes.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "cost",
        "failed_at",
        "failure",
        "farthest",
        "id",
        "joined",
        "kept",
        "longest",
        "metrics",
        "origin",
        "parent",
        "points",
        "running",
        "start",
        "stateless_at",
        "timeline",
        "waiting",
    )

    def __init__(self, node_id: int, *, origin: Point, timeline: Timeline, cost: float) -> None:
        self.id = node_id
        self.origin = origin
        self.parent = origin.node
        self.start = origin.epoch
        self.timeline = timeline
        self.cost = cost
        self.farthest = origin.epoch
        """The farthest epoch that any trial has requested on this node."""
        self.children: dict[tuple[int, Hashable], Node] = _NO_CHILDREN
        self.points: dict[int, Point] = _NO_POINTS
        self.waiting: dict[int, set[Hashable]] = _NO_REQUESTS
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.checkpoints: dict[int, CheckpointRef] = _NO_CHECKPOINTS
        self.kept: dict[int, CheckpointRef] = _NO_CHECKPOINTS
        """States that another plan has trained and that this plan has not evaluated yet."""
        self.running: tuple[int, int] | None = None
        self.failed_at: int | None = None
        """The first epoch that training cannot reach."""
        self.stateless_at: int | None = None
        """The first epoch whose state cannot be had, so that nothing goes on from there."""
        self.failure = ("", "", "")
        self.joined = False
        """Whether the node counts as waiting at its origin."""
        self.longest = 0.0
        """Cost of the longest path of pending work from ``start``: an upper bound."""

    def __repr__(self) -> str:
        return f"Node({self.id}, start={self.start}, farthest={self.farthest})"

    def wants(self) -> list[int]:
        """Return the epochs that are needed but not available yet, ascending."""
        states = [
            epoch
            for epoch, point in self.points.items()
            if point.num_waiting and epoch not in self.checkpoints
        ]
        return sorted({*self.waiting, *states})

    def last_checkpoint(self, *, before: int) -> int | None:
        """Return the last epoch below ``before`` whose checkpoint is on this node itself."""
        return max((epoch for epoch in self.checkpoints if epoch < before), default=None)

    def add_child(self, epoch: int, key: Hashable, child: Node) -> None:
        """Add a node that branches off this one."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[epoch, key] = child

    def point(self, epoch: int) -> Point:
        """Return the point at an epoch; create it if needed."""
        if self.points is _NO_POINTS:
            self.points = {}
        if epoch not in self.points:
            self.points[epoch] = Point(self, epoch)
        return self.points[epoch]

    def add_request(self, epoch: int, trial: Hashable) -> None:
        """Record that a trial waits for the metrics at an epoch."""
        if self.waiting is _NO_REQUESTS:
            self.waiting = {}
        self.waiting.setdefault(epoch, set()).add(trial)

    def add_checkpoint(self, ref: CheckpointRef) -> None:
        """Record a checkpoint of this node."""
        if self.checkpoints is _NO_CHECKPOINTS:
            self.checkpoints = {}
        self.checkpoints[ref.epoch] = ref

    def add_kept(self, ref: CheckpointRef) -> None:
        """Record a state that another plan has trained; its epoch must still be evaluated."""
        if self.kept is _NO_CHECKPOINTS:
            self.kept = {}
        self.kept[ref.epoch] = ref


# Shared by all nodes whose container is empty; replaced before the first write.
_NO_CHILDREN: dict[tuple[int, Hashable], Node] = {}
_NO_POINTS: dict[int, Point] = {}
_NO_REQUESTS: dict[int, set[Hashable]] = {}
_NO_CHECKPOINTS: dict[int, CheckpointRef] = {}


class Agenda:
    """All pending work, keyed by the place where it can start.

    A node with pending work either continues from one of its own checkpoints or waits at its
    origin: the point of its parent (or the beginning of training) where it branches off.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        cuts: Sequence[int] = (),
        intervals: Sequence[BranchInterval] = (),
        keep_branches: bool = False,
    ) -> None:
        self._nodes = nodes
        self._cuts = tuple(cuts)
        self._intervals = [each for each in intervals if each.first < each.last]
        self._ends: dict[int, dict[str, set[Hashable]]] = {}
        """The pieces that may end at each epoch, by hyper-parameter."""
        for each in intervals:
            if each.first == each.last:
                ends = self._ends.setdefault(each.first, {})
                ends.setdefault(each.name, set()).add(each.piece)
        self._keep_branches = keep_branches
        self.beginning = Point(None, 0)
        # Entries are (-cost of the longest path, node id, epoch). Epoch -1 marks a node that
        # continues from its own checkpoint; node -1 with epoch 0 is the beginning of training.
        self._ready: list[tuple[float, int, int]] = []

    @property
    def longest(self) -> float:
        """Cost of the longest path that can start now: an upper bound, never too low."""
        return -self._ready[0][0] if self._ready else 0.0

    def demand(self, node: Node, epoch: int) -> None:
        """Record new work on a node, up to ``epoch``."""
        cost = (epoch - node.start) * node.cost
        while True:
            if cost <= node.longest and (node.joined or node.running is not None):
                return  # the ancestors already count on a path at least this long
            node.longest = max(node.longest, cost)
            if node.running is not None:
                return  # settled when the running stages end
            if not self._wait_or_queue(node) or node.parent is None:
                return
            parent = node.parent
            cost = (node.start - parent.start) * parent.cost + node.longest
            node = parent

    def settle(self, node: Node) -> None:
        """Update the agenda after a change to the node.

        A change is a stage that ended, a checkpoint that appeared or disappeared, or a request that
        was dropped.
        """
        at: Node | None = node
        while at is not None:
            was_waiting = at.joined
            changed = self._settle_one(at)
            origin = at.origin
            above = origin.node
            if above is None or origin.available or not (changed or was_waiting != at.joined):
                return
            at = above

    def reopen(self, point: Point) -> None:
        """Queue the nodes that wait at a point whose state has become available (again)."""
        if point.num_waiting:
            self._queue_point(point)

    def pop(self) -> Chain | None:
        """Remove and return the longest chain that can start now, or None."""
        while self._ready:
            noted, node_id, epoch = self._ready[0]
            if epoch < 0 and node_id >= 0:
                start = self._pop_own(self._nodes[node_id], noted)
            else:
                start = self._pop_from_point(self._point_of(node_id, epoch))
            if start is not None:
                return self._chain(start[0], start[1])
        return None

    def cuts(self, node: Node, start: int, *, stop: int) -> set[int]:
        """Return the epochs in ``(start, stop]`` where the search space may branch off a node."""
        found = {epoch for epoch in self._cuts if start < epoch <= stop}
        found.update(
            epoch
            for epoch, ends in self._ends.items()
            if start < epoch <= stop
            and any(node.timeline.piece(name, epoch - 1) in ends[name] for name in ends)
        )
        for each in self._intervals:
            inside = range(max(each.first, start + 1), min(each.last, stop) + 1)
            found.update(
                epoch for epoch in inside if node.timeline.piece(each.name, epoch - 1) == each.piece
            )
        return found

    # -- what waits where -------------------------------------------------------------

    def _settle_one(self, node: Node) -> bool:
        """Update one node's place; return True if its longest path changed."""
        if node.running is not None:
            self._leave(node)
            return False
        wants = node.wants()
        if not wants:
            self._leave(node)
            changed, node.longest = node.longest != 0.0, 0.0
            return changed
        longest = self._longest(node, wants)
        changed, node.longest = longest != node.longest, longest
        self._wait_or_queue(node)
        return changed

    def _wait_or_queue(self, node: Node) -> bool:
        """Queue a node where its work can start; return True if that point is not reached yet."""
        wants = node.wants() if node.checkpoints else ()
        own = node.last_checkpoint(before=wants[0]) if wants else None
        if own is not None:
            self._leave(node)
            heappush(self._ready, (-self._remaining(node, own), node.id, -1))
            return False
        origin = node.origin
        if not node.joined:
            node.joined = True
            origin.num_waiting += 1
        heappush(origin.heap, (-node.longest, node.id))
        if origin.available:
            self._queue_point(origin)
            return False
        return True

    def _leave(self, node: Node) -> None:
        if node.joined:
            node.joined = False
            node.origin.num_waiting -= 1

    def _queue_point(self, point: Point) -> None:
        """Queue a point as ready unless it is already queued with at least this cost."""
        longest = -point.heap[0][0] if point.heap else 0.0
        if longest > point.queued:
            point.queued = longest
            node_id = -1 if point.node is None else point.node.id
            heappush(self._ready, (-longest, node_id, point.epoch))

    def _point_of(self, node_id: int, epoch: int) -> Point:
        return self.beginning if node_id < 0 else self._nodes[node_id].points[epoch]

    # -- longest paths ----------------------------------------------------------------

    def _longest(self, node: Node, wants: Sequence[int]) -> float:
        return max(self._through(node, epoch, node.start) for epoch in wants)

    def _remaining(self, node: Node, at: int) -> float:
        return max(self._through(node, epoch, at) for epoch in node.wants() if epoch > at)

    def _through(self, node: Node, epoch: int, at: int) -> float:
        """Return the cost from ``at`` to ``epoch``, plus the longest child that waits there."""
        cost = (epoch - at) * node.cost
        child = self._top(node.points.get(epoch))
        return cost if child is None else cost + child.longest

    def _top(self, point: Point | None) -> Node | None:
        """Return the waiting child with the longest path, after removing outdated entries."""
        if point is None or not point.num_waiting:
            return None
        if len(point.heap) > 4 * point.num_waiting + 16:
            self._compact(point)
        while point.heap:
            noted, node_id = point.heap[0]
            node = self._nodes[node_id]
            if node.joined and node.longest == -noted:
                return node
            heappop(point.heap)
        return None

    def _compact(self, point: Point) -> None:
        ids = {node_id for _, node_id in point.heap}
        point.heap = [(-self._nodes[i].longest, i) for i in ids if self._nodes[i].joined]
        heapify(point.heap)

    # -- taking work ------------------------------------------------------------------

    def _pop_own(self, node: Node, noted: float) -> tuple[Node, int] | None:
        heappop(self._ready)
        wants = node.wants()
        own = node.last_checkpoint(before=wants[0]) if wants else None
        if node.running is not None or node.joined or own is None:
            return None
        remaining = self._remaining(node, own)
        if remaining < -noted:
            heappush(self._ready, (-remaining, node.id, -1))
            return None
        return node, own

    def _pop_from_point(self, point: Point) -> tuple[Node, int] | None:
        noted, _, _ = heappop(self._ready)
        if -noted != point.queued:
            return None  # a newer entry represents this point
        point.queued = 0.0
        child = self._top(point)
        if child is None or not point.available:
            return None
        exact = self._longest(child, child.wants())
        if exact < child.longest:
            child.longest = exact
            heappush(point.heap, (-exact, child.id))
            self._queue_point(point)
            return None
        if child.longest < -noted:
            self._queue_point(point)
            return None
        self._leave(child)
        self.reopen(point)
        return child, point.epoch

    def _chain(self, node: Node, at: int) -> Chain:
        """Follow the longest path and mark each node on it as running."""
        stages: list[Stage] = []
        resume = node.checkpoints.get(at) or (
            None if node.origin.node is None else node.origin.node.checkpoints.get(at)
        )
        while True:
            wants = [epoch for epoch in node.wants() if epoch > at]
            stop = max(wants, key=lambda epoch: self._through(node, epoch, at))
            child = self._top(node.points.get(stop)) if stop not in node.checkpoints else None
            stages.extend(self._cut(node, at, stop=stop, wants=wants))
            node.running = (at, stop)
            if child is None:
                return Chain(stages=tuple(stages), timeline=node.timeline, resume=resume)
            self._leave(child)
            node, at = child, stop

    def _cut(self, node: Node, start: int, *, stop: int, wants: Sequence[int]) -> list[Stage]:
        points = node.points if self._keep_branches else ()
        ends = {epoch for epoch in (*wants, *points) if start < epoch <= stop}
        ends |= self.cuts(node, start, stop=stop)
        out = []
        for end in sorted(ends):
            kept = (ref for epoch, ref in node.kept.items() if start < epoch <= end)
            out.append(Stage(node=node.id, start=start, stop=end, kept=tuple(kept)))
            start = end
        return out
