"""Records of studies and plans in SQL, checkpoints in files."""

from ._checkpoints import CheckpointFolder as CheckpointFolder
from ._driver import Driver as Driver
from ._engine import shown as shown
from ._front import best_trials as best_trials, nondominated as nondominated
from ._heartbeat import Heartbeat as Heartbeat
from ._lease import Lease as Lease
from ._optuna import export_optuna as export_optuna, optuna_storage as optuna_storage
from ._records import (
    Changes as Changes,
    CheckpointAdded as CheckpointAdded,
    CheckpointRemoved as CheckpointRemoved,
    Claim as Claim,
    EpochRecord as EpochRecord,
    LogRecord as LogRecord,
    NodeRecord as NodeRecord,
    PlanInfo as PlanInfo,
    PlanRecords as PlanRecords,
    PriorRecord as PriorRecord,
    Record as Record,
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
from ._store import Store as Store


__all__ = [
    "Changes",
    "CheckpointAdded",
    "CheckpointFolder",
    "CheckpointRemoved",
    "Claim",
    "Driver",
    "EpochRecord",
    "Heartbeat",
    "Lease",
    "LogRecord",
    "NodeRecord",
    "PlanInfo",
    "PlanRecords",
    "PriorRecord",
    "Record",
    "StageRecord",
    "Store",
    "StudyInfo",
    "StudyMoved",
    "StudyRecords",
    "StudySummary",
    "TrialAsked",
    "TrialEnqueued",
    "TrialFailed",
    "TrialRecord",
    "TrialReported",
    "TrialStopped",
    "best_trials",
    "export_optuna",
    "nondominated",
    "optuna_storage",
    "shown",
]
