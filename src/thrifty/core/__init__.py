"""Errors, seeds, clocks and events: what every other room may use."""

from ._clock import Clock as Clock, SystemClock as SystemClock
from ._errors import (
    AlgorithmError as AlgorithmError,
    CheckpointError as CheckpointError,
    DivergedError as DivergedError,
    MissingExtraError as MissingExtraError,
    ScheduleError as ScheduleError,
    SpaceError as SpaceError,
    StoreBusyError as StoreBusyError,
    StoreError as StoreError,
    StoreVersionError as StoreVersionError,
    StoreWriteError as StoreWriteError,
    StudyMismatchError as StudyMismatchError,
    StudyNotFoundError as StudyNotFoundError,
    TaskError as TaskError,
    ThriftyError as ThriftyError,
    TrainingError as TrainingError,
    UsageError as UsageError,
    WorkerLostError as WorkerLostError,
)
from ._events import (
    CheckpointLost as CheckpointLost,
    CheckpointRef as CheckpointRef,
    EpochDone as EpochDone,
    Event as Event,
    StageDone as StageDone,
    StageFailed as StageFailed,
    StageStarted as StageStarted,
)
from ._seeds import (
    derive_seed as derive_seed,
    fingerprint as fingerprint,
    step_seed as step_seed,
)


__all__ = [
    "AlgorithmError",
    "CheckpointError",
    "CheckpointLost",
    "CheckpointRef",
    "Clock",
    "DivergedError",
    "EpochDone",
    "Event",
    "MissingExtraError",
    "ScheduleError",
    "SpaceError",
    "StageDone",
    "StageFailed",
    "StageStarted",
    "StoreBusyError",
    "StoreError",
    "StoreVersionError",
    "StoreWriteError",
    "StudyMismatchError",
    "StudyNotFoundError",
    "SystemClock",
    "TaskError",
    "ThriftyError",
    "TrainingError",
    "UsageError",
    "WorkerLostError",
    "derive_seed",
    "fingerprint",
    "step_seed",
]
