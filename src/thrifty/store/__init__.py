"""Storage of studies and plans in a SQL database, and of checkpoints in files."""

from ._address import redact_url
from ._checkpoints import CheckpointFolder
from ._failures import (
    FailureGroup,
    failure_groups,
)
from ._frames import FrameBackend, frame
from ._records import (
    Changes,
    CheckpointAdded,
    CheckpointRemoved,
    Claim,
    EpochAgain,
    EpochRecord,
    LogRecord,
    NodeRecord,
    PlanInfo,
    PlanRecords,
    PriorRecord,
    Record,
    RefusalRecord,
    StageRecord,
    StudyInfo,
    StudyMoved,
    StudyRecords,
    StudySnapshot,
    StudySummary,
    TrialAsked,
    TrialEnqueued,
    TrialFailed,
    TrialRecord,
    TrialReported,
    TrialStopped,
)
from ._schema import VERSION
from ._store import Driver, Store
from .coordination._leases import Heartbeat, Lease
from .queries import COLUMNS, Order, Paths, StudyView, TrialFilter, Views, sortable
from .queries._trial_queries import best_trials, nondominated


__all__ = [
    "COLUMNS",
    "VERSION",
    "Changes",
    "CheckpointAdded",
    "CheckpointFolder",
    "CheckpointRemoved",
    "Claim",
    "Driver",
    "EpochAgain",
    "EpochRecord",
    "FailureGroup",
    "FrameBackend",
    "Heartbeat",
    "Lease",
    "LogRecord",
    "NodeRecord",
    "Order",
    "Paths",
    "PlanInfo",
    "PlanRecords",
    "PriorRecord",
    "Record",
    "RefusalRecord",
    "StageRecord",
    "Store",
    "StudyInfo",
    "StudyMoved",
    "StudyRecords",
    "StudySnapshot",
    "StudySummary",
    "StudyView",
    "TrialAsked",
    "TrialEnqueued",
    "TrialFailed",
    "TrialFilter",
    "TrialRecord",
    "TrialReported",
    "TrialStopped",
    "Views",
    "best_trials",
    "failure_groups",
    "frame",
    "nondominated",
    "redact_url",
    "sortable",
]
