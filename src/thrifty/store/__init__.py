"""Storage of studies and plans in a SQL database, and of checkpoints in files."""

from ._address import redact_url as redact_url
from ._checkpoints import CheckpointFolder as CheckpointFolder
from ._driver import Driver as Driver
from ._failures import (
    FailureGroup as FailureGroup,
    failure_groups as failure_groups,
)
from ._frames import FrameBackend as FrameBackend, frame as frame
from ._front import best_trials as best_trials, nondominated as nondominated
from ._records import (
    Changes as Changes,
    CheckpointAdded as CheckpointAdded,
    CheckpointRemoved as CheckpointRemoved,
    Claim as Claim,
    EpochAgain as EpochAgain,
    EpochRecord as EpochRecord,
    LogRecord as LogRecord,
    NodeRecord as NodeRecord,
    PlanInfo as PlanInfo,
    PlanRecords as PlanRecords,
    PriorRecord as PriorRecord,
    Record as Record,
    RefusalRecord as RefusalRecord,
    StageRecord as StageRecord,
    StudyInfo as StudyInfo,
    StudyMoved as StudyMoved,
    StudyRecords as StudyRecords,
    StudySummary as StudySummary,
    TrialAsked as TrialAsked,
    TrialEnqueued as TrialEnqueued,
    TrialFailed as TrialFailed,
    TrialRecord as TrialRecord,
    TrialReported as TrialReported,
    TrialStopped as TrialStopped,
)
from ._schema import VERSION as VERSION
from ._store import Store as Store
from .coordination._leases import Heartbeat as Heartbeat, Lease as Lease
from .queries import (
    COLUMNS as COLUMNS,
    Order as Order,
    Paths as Paths,
    StudyView as StudyView,
    TrialFilter as TrialFilter,
    Views as Views,
    sortable as sortable,
)


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
