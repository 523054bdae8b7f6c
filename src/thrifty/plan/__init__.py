"""The search plan and the stage forest: pure data structures, without files or tensors."""

from ._forest import (
    ForestStage as ForestStage,
    StageState as StageState,
    stage_forest as stage_forest,
)
from ._garbage import evictable_checkpoints as evictable_checkpoints, superseded as superseded
from ._policies import (
    Measured as Measured,
    batch_size_packs as batch_size_packs,
    nearest_packs as nearest_packs,
    pack_size as pack_size,
    random_packs as random_packs,
)
from ._search_plan import (
    MAX_ATTEMPTS as MAX_ATTEMPTS,
    MAX_EVICTIONS as MAX_EVICTIONS,
    SearchPlan as SearchPlan,
)
from ._stages import Answer as Answer, Chain as Chain, Node as Node, Stage as Stage


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
