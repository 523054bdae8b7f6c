"""The search plan and the stage forest: pure data structures, without files or tensors."""

from ._derived import (
    ForestStage,
    Measured,
    StageState,
    evictable_checkpoints,
    pack_size,
    stage_forest,
    superseded,
)
from ._search_plan import MAX_ATTEMPTS, MAX_EVICTIONS, MAX_LOSSES, SearchPlan
from ._stages import Answer, Chain, Node, Stage


__all__ = [
    "MAX_ATTEMPTS",
    "MAX_EVICTIONS",
    "MAX_LOSSES",
    "Answer",
    "Chain",
    "ForestStage",
    "Measured",
    "Node",
    "SearchPlan",
    "Stage",
    "StageState",
    "evictable_checkpoints",
    "pack_size",
    "stage_forest",
    "superseded",
]
