"""Policies: how many trials a worker trains at a time, and which checkpoints are deleted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thrifty.core import CheckpointRef
from thrifty.perf import PackCurve, choose_pack

from ._search_plan import SearchPlan
from ._stages import Chain


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
