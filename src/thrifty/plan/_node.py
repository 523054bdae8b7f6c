"""The search plan's tree: nodes, and the points at which other nodes branch off them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from thrifty.core import CheckpointRef
from thrifty.space import Timeline


class Point:
    """The state of a node at one epoch, as the place where other nodes begin.

    ``heap`` holds ``(-longest, node id)`` of children that need this state; entries
    are checked when they are popped, never removed before.
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
        """Whether training can start here now: a checkpoint exists, or it is the very beginning."""
        return self.node is None or self.epoch in self.node.checkpoints


class Node:
    """What is trained from ``start`` on under one timeline, and all that is known of it.

    Epochs before ``start`` belong to its ancestors. A trial is a node and an epoch on it.
    Containers are made when first needed: there may be a million nodes.
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
        """The farthest epoch that anyone ever asked for here."""
        self.children: dict[tuple[int, Hashable], Node] = _NO_CHILDREN
        self.points: dict[int, Point] = _NO_POINTS
        self.waiting: dict[int, set[Hashable]] = _NO_REQUESTS
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.checkpoints: dict[int, CheckpointRef] = _NO_CHECKPOINTS
        self.kept: dict[int, CheckpointRef] = _NO_CHECKPOINTS
        """States of epochs that another plan has trained, and that are not evaluated here yet."""
        self.running: tuple[int, int] | None = None
        self.failed_at: int | None = None
        """The first epoch that cannot be reached."""
        self.failure = ("", "", "")
        self.joined = False
        """Whether it counts among those that wait at its origin."""
        self.longest = 0.0
        """Cost of the longest path of pending work from ``start``; may be too high, never too low."""

    def __repr__(self) -> str:
        return f"Node({self.id}, start={self.start}, farthest={self.farthest})"

    def wants(self) -> list[int]:
        """The epochs that are needed here and not there yet, ascending."""
        states = [
            epoch
            for epoch, point in self.points.items()
            if point.num_waiting and epoch not in self.checkpoints
        ]
        return sorted({*self.waiting, *states})

    def last_checkpoint(self, *, before: int) -> int | None:
        """The last epoch below ``before`` whose state is kept on this node itself."""
        return max((epoch for epoch in self.checkpoints if epoch < before), default=None)

    def add_child(self, epoch: int, key: Hashable, child: Node) -> None:
        """Hangs another node onto this one."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[epoch, key] = child

    def point(self, epoch: int) -> Point:
        """The point at an epoch, made if needed."""
        if self.points is _NO_POINTS:
            self.points = {}
        if epoch not in self.points:
            self.points[epoch] = Point(self, epoch)
        return self.points[epoch]

    def add_request(self, epoch: int, trial: Hashable) -> None:
        """A trial waits for the metrics at an epoch."""
        if self.waiting is _NO_REQUESTS:
            self.waiting = {}
        self.waiting.setdefault(epoch, set()).add(trial)

    def add_checkpoint(self, ref: CheckpointRef) -> None:
        """A state is kept."""
        if self.checkpoints is _NO_CHECKPOINTS:
            self.checkpoints = {}
        self.checkpoints[ref.epoch] = ref

    def add_kept(self, ref: CheckpointRef) -> None:
        """A state comes from another plan; its epoch has to be evaluated."""
        if self.kept is _NO_CHECKPOINTS:
            self.kept = {}
        self.kept[ref.epoch] = ref


# shared by all nodes that have none; replaced before the first write
_NO_CHILDREN: dict[tuple[int, Hashable], Node] = {}
_NO_POINTS: dict[int, Point] = {}
_NO_REQUESTS: dict[int, set[Hashable]] = {}
_NO_CHECKPOINTS: dict[int, CheckpointRef] = {}
