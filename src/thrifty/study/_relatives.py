"""The states that a new plan takes over from plans with equal training but other metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thrifty.core import CheckpointRef
from thrifty.pack import TRAIN_LOSS
from thrifty.plan import SearchPlan
from thrifty.space import Timeline
from thrifty.store import CheckpointAdded, NodeRecord, PlanRecords

from ._ledger import node_record


def taken_over(relatives: Sequence[PlanRecords]) -> list[NodeRecord | CheckpointAdded]:
    """Return the nodes and states of other plans as records of a new plan that has no id yet.

    Epochs are left out: their metrics are computed again, from the states or by training.

    Args:
        relatives: Plans of the same family. If several have a state, the first one counts.
    """
    merged = SearchPlan()
    states: dict[tuple[int, int], CheckpointRef] = {}
    for records in relatives:
        places = {
            node.node: merged.insert(Timeline(node.config, epochs=node.epochs))
            for node in records.nodes
        }
        losses = {(e.node, e.epoch): e.metrics.get(TRAIN_LOSS) for e in records.epochs}
        for ref in records.checkpoints:
            loss = losses.get((ref.node, ref.epoch), ref.train_loss)
            if loss is None:  # without the training loss, the metrics would be incomplete
                continue
            owner = merged.owner(places[ref.node], ref.epoch).id
            states.setdefault((owner, ref.epoch), replace(ref, node=owner, train_loss=loss))
    return [
        *(node_record(node, plan=0) for node in merged.nodes),
        *(CheckpointAdded(plan=0, ref=ref) for ref in states.values()),
    ]
