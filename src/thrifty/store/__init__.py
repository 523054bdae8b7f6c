"""Records of studies and plans in SQL, checkpoints in files."""

from ._checkpoints import CheckpointFolder as CheckpointFolder
from ._front import best_trials as best_trials, nondominated as nondominated
from ._lease import Lease as Lease
from ._optuna import export_optuna as export_optuna, optuna_storage as optuna_storage
from ._records import (
    CheckpointAdded as CheckpointAdded,
    CheckpointRemoved as CheckpointRemoved,
    EpochRecord as EpochRecord,
    LogRecord as LogRecord,
    NodeRecord as NodeRecord,
    PlanInfo as PlanInfo,
    PlanRecords as PlanRecords,
    PriorRecord as PriorRecord,
    Record as Record,
    StageRecord as StageRecord,
    StudyInfo as StudyInfo,
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
    "CheckpointAdded",
    "CheckpointFolder",
    "CheckpointRemoved",
    "EpochRecord",
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
]
