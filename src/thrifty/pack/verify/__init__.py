"""Checks that a trial in a pack gets what it would get alone.

This is plain PyTorch on values: nothing here knows of blocks, back-ends or studies. See
``docs/design/trust.md``.
"""

from ._budget import (
    AloneTime as AloneTime,
    CheckBudget as CheckBudget,
    SoloTimes as SoloTimes,
    median_interval as median_interval,
)
from ._compare import (
    Difference as Difference,
    MetricsDifference as MetricsDifference,
    StepTaken as StepTaken,
    compare_metrics as compare_metrics,
    compare_step as compare_step,
    differences as differences,
    relative_tolerance as relative_tolerance,
    same as same,
)
from ._keeper import (
    Keeper as Keeper,
    as_it_was as as_it_was,
    training_places as training_places,
)
from ._probe import (
    FIRST_BATCH as FIRST_BATCH,
    Probe as Probe,
    how_far_apart as how_far_apart,
    outside_of_state as outside_of_state,
    probes_differ as probes_differ,
    stand_in as stand_in,
)
from ._reference import (
    OwnState as OwnState,
    StepAlone as StepAlone,
    are_metrics_rounding as are_metrics_rounding,
    exchanged as exchanged,
    gradients_alone as gradients_alone,
    is_rounding as is_rounding,
    own_state as own_state,
    own_tensors as own_tensors,
    step_alone as step_alone,
)
from ._watch import Change as Change, Watch as Watch


__all__ = [
    "FIRST_BATCH",
    "AloneTime",
    "Change",
    "CheckBudget",
    "Difference",
    "Keeper",
    "MetricsDifference",
    "OwnState",
    "Probe",
    "SoloTimes",
    "StepAlone",
    "StepTaken",
    "Watch",
    "are_metrics_rounding",
    "as_it_was",
    "compare_metrics",
    "compare_step",
    "differences",
    "exchanged",
    "gradients_alone",
    "how_far_apart",
    "is_rounding",
    "median_interval",
    "outside_of_state",
    "own_state",
    "own_tensors",
    "probes_differ",
    "relative_tolerance",
    "same",
    "stand_in",
    "step_alone",
    "training_places",
]
