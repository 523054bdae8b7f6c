"""Checks that a trial in a pack gets what it would get alone.

This is plain PyTorch on values: nothing here knows of blocks, back-ends or studies. See
``docs/design/trust.md``.
"""

from ._compare import (
    Difference,
    KnownRounding,
    MetricsDifference,
    StepTaken,
    compare_metrics,
    compare_step,
    differences,
    relative_tolerance,
    rounds_to_tf32,
    same,
    step_differences,
    worst,
)
from ._held import MadeOnce, cached_name, digest_or_none
from ._keeper import Keeper, as_it_was, cached_places, training_places
from ._reference import (
    AloneTime,
    CheckBudget,
    OwnState,
    SoloTimes,
    StepAlone,
    are_metrics_rounding,
    exchanged,
    gradients_alone,
    is_rounding,
    median_interval,
    moment_tensors,
    own_state,
    own_tensors,
    step_alone,
)
from ._restored import (
    FIRST_BATCH,
    Probe,
    content_of,
    contents_of,
    how_far_apart,
    outside_of_state,
    probes_differ,
    stand_in,
)
from ._used_names import UsedNames, used_names
from ._watch import Change, Watch


__all__ = [
    "FIRST_BATCH",
    "AloneTime",
    "Change",
    "CheckBudget",
    "Difference",
    "Keeper",
    "KnownRounding",
    "MadeOnce",
    "MetricsDifference",
    "OwnState",
    "Probe",
    "SoloTimes",
    "StepAlone",
    "StepTaken",
    "UsedNames",
    "Watch",
    "are_metrics_rounding",
    "as_it_was",
    "cached_name",
    "cached_places",
    "compare_metrics",
    "compare_step",
    "content_of",
    "contents_of",
    "differences",
    "digest_or_none",
    "exchanged",
    "gradients_alone",
    "how_far_apart",
    "is_rounding",
    "median_interval",
    "moment_tensors",
    "outside_of_state",
    "own_state",
    "own_tensors",
    "probes_differ",
    "relative_tolerance",
    "rounds_to_tf32",
    "same",
    "stand_in",
    "step_alone",
    "step_differences",
    "training_places",
    "used_names",
    "worst",
]
