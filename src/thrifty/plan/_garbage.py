"""Which checkpoints may go when the disk budget is used up."""

from __future__ import annotations

from collections.abc import Iterable

from thrifty.core import CheckpointRef

from ._search_plan import SearchPlan


def droppable(
    plan: SearchPlan, *, live: Iterable[tuple[int, int]], budget_bytes: float
) -> list[CheckpointRef]:
    """The checkpoints to delete so that the rest fits the budget, cheapest to train again first.

    A checkpoint is referenced, and stays, while a live trial (``(node, epoch)``: where it stands) would
    go on from it, or pending work starts there. If the referenced ones alone are over the
    budget they all stay: the budget bends before work is lost. Files of other plans do not count.
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
    """The latest checkpoint on the path to a state."""
    node = plan.owner(node_id, epoch)
    while True:
        own = node.last_checkpoint(before=epoch + 1)
        if own is not None:
            return node.id, own
        if node.parent is None:
            return None
        node, epoch = node.parent, node.start
