"""Critical-path scheduling: which chain of stages the next idle worker gets.

Hippo builds the stage forest anew at each decision; with a hundred thousand pending stages that
takes seconds. The agenda keeps only what a decision needs and updates it as requests come in and
stages end: the cost of the longest pending path that starts at each node, and heaps of the places
where training can start now. Outdated heap entries are never searched for: they are detected when
they reach the top. A cost can only turn out lower than its heap entry says, so the first entry
that is still correct is the longest path.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush

from thrifty.space import BranchInterval

from ._stages import Chain, Node, Point, Stage


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
                epoch
                for epoch in inside
                if node.timeline.piece(each.name, epoch - 1) == each.piece
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
