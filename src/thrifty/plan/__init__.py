"""The search plan and the stage forest: pure data structures, without files or tensors."""

from ._forest import ForestStage, StageState, stage_forest
from ._garbage import evictable_checkpoints, superseded
from ._policies import Measured, batch_size_packs, nearest_packs, pack_size, random_packs
from ._search_plan import MAX_ATTEMPTS, MAX_EVICTIONS, SearchPlan
from ._stages import Answer, Chain, Node, Stage


__all__ = [
    "MAX_ATTEMPTS",
    "MAX_EVICTIONS",
    "Answer",
    "Chain",
    "ForestStage",
    "Measured",
    "Node",
    "SearchPlan",
    "Stage",
    "StageState",
    "batch_size_packs",
    "evictable_checkpoints",
    "nearest_packs",
    "pack_size",
    "random_packs",
    "stage_forest",
    "superseded",
]
