"""The stage forest: the plan cut into stages, for display and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ._search_plan import SearchPlan
from ._stages import Node


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
