"""Checks that a trial in a pack gets what it would get alone.

Plain PyTorch on values: nothing here knows of blocks, back-ends or studies. See ``docs/design/trust.md``.
"""

from ._budget import CheckBudget as CheckBudget
from ._compare import (
    Difference as Difference,
    MetricsDifference as MetricsDifference,
    StepTaken as StepTaken,
    compare_metrics as compare_metrics,
    compare_step as compare_step,
    relative_tolerance as relative_tolerance,
)
from ._reference import (
    OwnState as OwnState,
    StepAlone as StepAlone,
    own_state as own_state,
    own_tensors as own_tensors,
    step_alone as step_alone,
)
from ._watch import Change as Change, Keeper as Keeper, Watch as Watch


__all__ = [
    "Change",
    "CheckBudget",
    "Difference",
    "Keeper",
    "MetricsDifference",
    "OwnState",
    "StepAlone",
    "StepTaken",
    "Watch",
    "compare_metrics",
    "compare_step",
    "own_state",
    "own_tensors",
    "relative_tolerance",
    "step_alone",
]
