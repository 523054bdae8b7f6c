"""Every error that thrifty raises on purpose.

::

    ThriftyError
    ├── UsageError (ValueError)      something the user wrote cannot work
    │   ├── SpaceError               a domain, a condition or a space
    │   ├── ScheduleError            a schedule, or one that does not fit the run
    │   ├── AlgorithmError           an algorithm's options
    │   ├── TaskError                a task, its metrics, its hyper-parameters
    │   │   └── StateError           state outside of the checkpoint
    │   ├── GraphError               a graph, seeds or fanouts
    │   ├── LayerError               a layer's options, or an input that does not fit it
    │   ├── HeteroError              unequal workers, their data or their options
    │   ├── CloudError               a catalogue, a workload, or no fleet that fits
    │   └── StudyMismatchError       a stored study that is not the one asked for
    ├── StoreError                   the database or the checkpoint folder
    │   ├── StoreVersionError        written by a newer thrifty
    │   ├── StoreBusyError           another process runs this study
    │   ├── StoreUnreachableError    the database server does not answer
    │   ├── StoreWriteError          read-only place, full disk
    │   ├── StudyNotFoundError       no such study in this database
    │   └── CheckpointError          missing, truncated or altered file
    ├── TrainingError                what went wrong in one stage
    │   ├── DivergedError            a loss or metric that is not finite
    │   ├── WorkerLostError          a worker process ended unexpectedly
    │   ├── PackMismatchError        a packed model is not what it would be alone
    │   ├── PeerLostError            another worker of one job is gone
    │   └── TooFewWorkersError       one job has not enough workers left
    └── MissingExtraError (ImportError)   an optional dependency is absent

Messages say what is wrong, where, and how to mend it.
"""

from __future__ import annotations

from ._text import plain_text


class ThriftyError(Exception):
    """Root of every error raised by thrifty. Its text is plain, whatever names and values are in it."""

    def __str__(self) -> str:
        return plain_text(super().__str__(), lines=True)


class UsageError(ThriftyError, ValueError):
    """Something in the user's call or code cannot work."""


class SpaceError(UsageError):
    """A domain, a condition or a search space is not well formed."""


class ScheduleError(UsageError):
    """A schedule is not well formed, or does not fit the run."""


class AlgorithmError(UsageError):
    """An option of a search algorithm makes no sense."""


class TaskError(UsageError):
    """A task does not provide what the study needs."""


class StateError(TaskError):
    """A trial that is restored from its checkpoint does not go on as the live one does."""


class GraphError(UsageError):
    """A graph is not well formed, or cannot be sampled as asked."""


class LayerError(UsageError):
    """An option of a layer makes no sense, or its input does not fit."""


class HeteroError(UsageError):
    """Unequal workers cannot train together as asked."""


class CloudError(UsageError):
    """A catalogue or a workload makes no sense, or no fleet fits it."""


class StudyMismatchError(UsageError):
    """A stored study differs from the one that was asked for under its name."""


class StoreError(ThriftyError):
    """The database or the checkpoint folder cannot be used as asked."""


class StoreVersionError(StoreError):
    """The database was written by a newer version of thrifty."""


class StoreBusyError(StoreError):
    """Another live process runs this study, or holds its plan."""


class StoreWriteError(StoreError):
    """A record could not be written: read-only place, full disk."""


class StoreUnreachableError(StoreError):
    """The server of the database does not answer."""


class StudyNotFoundError(StoreError):
    """The database holds no study of this name."""


class CheckpointError(StoreError):
    """A checkpoint is missing, truncated or altered."""


class TrainingError(ThriftyError):
    """Training of one stage failed."""


class DivergedError(TrainingError):
    """A loss or a metric stopped being finite."""


class WorkerLostError(TrainingError):
    """A worker process ended without a word."""


class PackMismatchError(TrainingError):
    """A packed model differs from the same model trained alone, and this cannot be taken back."""


class PeerLostError(TrainingError):
    """Another worker of a job is gone; the others may go on."""


class TooFewWorkersError(TrainingError):
    """A job has not enough workers left."""


class MissingExtraError(ThriftyError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; run: pip install 'thrifty[{extra}]' (or: pip install {package})"
        )
