"""Nodes of the search plan, and stages as frozen values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from thrifty.core import CheckpointRef
from thrifty.space import Timeline


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
