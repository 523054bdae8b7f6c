"""Records of studies and plans in SQL, checkpoints in files."""

from ._checkpoints import CheckpointFolder as CheckpointFolder
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
    Record as Record,
    StageRecord as StageRecord,
    StudyInfo as StudyInfo,
    StudyRecords as StudyRecords,
    StudySummary as StudySummary,
    TrialAsked as TrialAsked,
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
    "Record",
    "StageRecord",
    "Store",
    "StudyInfo",
    "StudyRecords",
    "StudySummary",
    "TrialAsked",
    "TrialFailed",
    "TrialRecord",
    "TrialReported",
    "TrialStopped",
    "export_optuna",
    "optuna_storage",
]
