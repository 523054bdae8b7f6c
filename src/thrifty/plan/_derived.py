"""What follows from a search plan: its stages for display, pack sizes, checkpoints to delete."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thrifty.core import CheckpointRef
from thrifty.perf import PackCurve, choose_pack

from ._search_plan import SearchPlan
from ._stages import Chain, Node


StageState = Literal["done", "running", "pending", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestStage:
    """One stage of the forest, which trains epochs ``start + 1 .. stop``.

    ``parent`` is the index of the stage before it, ``num_trials`` the number of timelines that pass
    through it.
    """

    index: int
    parent: int | None
    node: int
    start: int
    stop: int
    state: StageState
    num_trials: int
    metrics: Mapping[str, float] | None


def stage_forest(plan: SearchPlan, *, ends: Mapping[tuple[int, int], int]) -> list[ForestStage]:
    """Cut the plan into stages wherever a node branches off or a trial ends.

    ``ends`` counts the trials that end at each ``(node, epoch)``.

    >>> from thrifty.space import Constant, Step, Timeline
    >>> plan = SearchPlan()
    >>> nodes = [
    ...     plan.insert(Timeline({"lr": lr}, epochs=9)) for lr in (Constant(0.1), Step(0.1, [3]))
    ... ]
    >>> for trial, node in enumerate(nodes):
    ...     plan.request(trial, node, 9)
    >>> [
    ...     (s.start, s.stop, s.num_trials)
    ...     for s in stage_forest(plan, ends={(n, 9): 1 for n in nodes})
    ... ]
    [(0, 3, 2), (3, 9, 1), (3, 9, 1)]
    """
    cuts: dict[int, set[int]] = {}
    for node_id, epoch in ends:
        owner = plan.owner(node_id, epoch)
        cuts.setdefault(owner.id, set()).add(epoch)
    for node in plan.nodes:
        if node.farthest > node.start and node.parent is not None:
            cuts.setdefault(node.parent.id, set()).add(node.start)
    passing = _passing(plan, ends)
    stages: list[ForestStage] = []
    at: dict[tuple[int, int], int] = {}
    for node in plan.nodes:
        if node.farthest == node.start:
            continue
        parent = None if node.parent is None else at[node.parent.id, node.start]
        start = node.start
        for stop in sorted({*cuts.get(node.id, ()), node.farthest}):
            stage = ForestStage(
                index=len(stages),
                parent=parent,
                node=node.id,
                start=start,
                stop=stop,
                state=_state(node, start, stop=stop),
                num_trials=passing.get((node.id, stop), 0),
                metrics=node.metrics.get(stop),
            )
            stages.append(stage)
            at[node.id, stop] = parent = stage.index
            start = stop
    return stages


def _passing(plan: SearchPlan, ends: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Count the trials that pass each cut.

    They end there, later on the same node, or on a child that branches off from there on.
    """
    arrivals: dict[int, dict[int, int]] = {}
    for (node_id, epoch), count in ends.items():
        owner = plan.owner(node_id, epoch)
        at = arrivals.setdefault(owner.id, {})
        at[epoch] = at.get(epoch, 0) + count
    out: dict[tuple[int, int], int] = {}
    for node in reversed(plan.nodes):  # visit children before their parents
        total = 0
        for epoch in sorted(arrivals.get(node.id, {}), reverse=True):
            total += arrivals[node.id][epoch]
            out[node.id, epoch] = total
        if node.parent is not None and total:
            above = arrivals.setdefault(node.parent.id, {})
            above[node.start] = above.get(node.start, 0) + total
    return out


def _state(node: Node, start: int, *, stop: int) -> StageState:
    if stop in node.metrics:
        return "done"
    if node.failed_at is not None and node.failed_at <= stop:
        return "failed"
    if node.running is not None and node.running[0] < stop and node.running[1] > start:
        return "running"
    return "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of joint training of one structure: back-end curves and device memory."""

    curves: tuple[PackCurve, ...]
    memory_bytes: float = math.inf


MAX_SIZE = 64
"""Largest pack: bigger ones only delay results that algorithms wait for."""


def pack_size(
    plan: SearchPlan,
    measured: Sequence[Measured],
    *,
    running: Iterable[Chain] = (),
    workers: int = 1,
    memory_margin: float = 0.9,
) -> int:
    """Return the number of trials each worker trains at a time to finish pending work soonest.

    ``measured`` holds the measurements of each structure. In a pack, each trial is slower than
    alone, but all together are faster. If one long path dominates the forecast, packs are small; if
    much other work is pending, they are large. See ``thrifty.perf.choose_pack``. Without
    measurements the size is 1.
    """
    if not measured:
        return 1
    longest = max([plan.longest_pending, *(float(chain.num_epochs) for chain in running)])
    total = max(float(plan.num_epochs_needed - plan.num_epochs_done), longest)
    if not total:
        return 1
    return max(
        choose_pack(
            each.curves,
            longest=longest,
            total=total,
            ready=MAX_SIZE * workers,
            workers=workers,
            cap_bytes=each.memory_bytes,
            margin=memory_margin,
            max_size=MAX_SIZE,
        ).size
        for each in measured
    )


def superseded(
    plan: SearchPlan, node_id: int, *, stands: Callable[[int, int], bool]
) -> list[CheckpointRef]:
    """Return the checkpoints of a node that training has passed and nothing will start from.

    A later checkpoint of the node replaces them. Files of other plans are left alone. A checkpoint
    stays if

    - a trial stands there (``stands(node, epoch)``): it may go on, or its model may be loaded;
    - another node branches off there, or the search space may branch there;
    - pending or running work starts there.

    >>> from thrifty.space import Timeline
    >>> plan = SearchPlan(cuts=[2])
    >>> node = plan.insert(Timeline({"lr": 0.1}, epochs=9))
    >>> for epoch in range(1, 6):
    ...     plan.restore(CheckpointRef(node=node, epoch=epoch, path="", num_bytes=0, digest=""))
    >>> [ref.epoch for ref in superseded(plan, node, stands=lambda node, epoch: epoch == 3)]
    [1, 4]
    """
    node = plan.nodes[node_id]
    own = {epoch: ref for epoch, ref in node.checkpoints.items() if not ref.borrowed}
    last = max(own, default=0)
    starts = {node.last_checkpoint(before=epoch) for epoch in node.wants()}
    if node.running is not None:
        starts.add(node.running[0])
    return [
        ref
        for epoch, ref in own.items()
        if epoch < last
        and epoch not in starts
        and epoch not in node.points
        and not plan.may_branch(node, epoch)
        and not stands(node_id, epoch)
    ]


def evictable_checkpoints(
    plan: SearchPlan, *, live: Iterable[tuple[int, int]], budget_bytes: float
) -> list[CheckpointRef]:
    """Return the checkpoints to delete to fit the budget, cheapest to train again first.

    A checkpoint stays while pending work starts there, or while a live trial would continue from
    it. ``live`` gives the ``(node, epoch)`` that each live trial has reached. If these checkpoints
    alone exceed the budget, they all stay: going over budget is better than losing work. Files of
    other plans do not count.
    """
    refs = [ref for ref in plan.checkpoints() if not ref.borrowed]
    over = sum(ref.num_bytes for ref in refs) - budget_bytes
    if over <= 0:
        return []
    held = {_nearest(plan, node, epoch) for node, epoch in live}
    out = []
    for ref in sorted(refs, key=lambda ref: (ref.epoch, ref.node)):
        if over <= 0:
            break
        point = plan.nodes[ref.node].points.get(ref.epoch)
        busy = point is not None and point.num_waiting > 0
        if (ref.node, ref.epoch) not in held and not busy:
            out.append(ref)
            over -= ref.num_bytes
    return out


def _nearest(plan: SearchPlan, node_id: int, epoch: int) -> tuple[int, int] | None:
    """Return the latest checkpoint on the path to a state, as ``(node, epoch)``."""
    node = plan.owner(node_id, epoch)
    while True:
        own = node.last_checkpoint(before=epoch + 1)
        if own is not None:
            return node.id, own
        if node.parent is None:
            return None
        node, epoch = node.parent, node.start
