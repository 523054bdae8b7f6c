"""Every error that thrifty raises on purpose.

::

    ThriftyError
    ├── UsageError (ValueError)      the user's call or code is invalid
    │   ├── SpaceError               invalid domain, condition or search space
    │   ├── ScheduleError            invalid schedule, or one that does not fit the run
    │   ├── AlgorithmError           invalid option of a search algorithm
    │   ├── TaskError                invalid task, metrics or hyper-parameters
    │   │   └── StateError           training state that the checkpoint does not contain
    │   ├── GraphError               invalid graph, seeds or fanouts
    │   ├── LayerError               invalid option of a layer, or an input that does not fit
    │   ├── HeteroError              invalid heterogeneous workers, their data or their options
    │   ├── CloudError               invalid catalogue or workload, or no fleet fits
    │   └── StudyMismatchError       the stored study of this name is a different one
    ├── StoreError                   the database or the checkpoint folder
    │   ├── StoreVersionError        written by a newer thrifty
    │   ├── StoreBusyError           another process runs this study
    │   ├── StoreUnreachableError    the database server does not answer
    │   ├── StoreWriteError          read-only place, full disk
    │   ├── StudyNotFoundError       no such study in this database
    │   └── CheckpointError          missing, truncated or altered file
    ├── TrainingError                training of one stage failed
    │   ├── DivergedError            a loss or metric is not finite
    │   ├── WorkerLostError          a worker process ended unexpectedly
    │   ├── PackMismatchError        a packed model differs from the same model trained alone
    │   ├── PeerLostError            another worker of the same job is gone
    │   └── TooFewWorkersError       too few workers of a job are left
    └── MissingExtraError (ImportError)   an optional dependency is not installed

Messages say what is wrong, where, and how to fix it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ._text import plain_text


class ThriftyError(Exception):
    """Root of every error raised by thrifty.

    Its text is printable, whatever names and values it contains.
    """

    def __str__(self) -> str:
        return plain_text(super().__str__(), lines=True)


class UsageError(ThriftyError, ValueError):
    """The user's call or code is invalid."""


class SpaceError(UsageError):
    """A domain, a condition or a search space is invalid."""


class ScheduleError(UsageError):
    """A schedule is invalid, or does not fit the run."""


class AlgorithmError(UsageError):
    """An option of a search algorithm is invalid."""


class TaskError(UsageError):
    """A task does not provide what the study needs."""


class StateError(TaskError):
    """A trial restored from its checkpoint continues differently from the live trial."""


class GraphError(UsageError):
    """A graph is invalid, or cannot be sampled as requested."""


class LayerError(UsageError):
    """An option of a layer is invalid, or its input does not fit."""


class HeteroError(UsageError):
    """Heterogeneous workers cannot train together as requested."""


class CloudError(UsageError):
    """A catalogue or a workload is invalid, or no fleet fits it."""


class StudyMismatchError(UsageError):
    """The stored study of this name differs from the requested one."""


class StoreError(ThriftyError):
    """The database or the checkpoint folder cannot be used as requested."""


class StoreVersionError(StoreError):
    """The database was written by a newer version of thrifty."""


class StoreBusyError(StoreError):
    """Another live process runs this study, or holds its plan."""


class StoreWriteError(StoreError):
    """A record could not be written: the disk is full, or the place is read-only."""


class StoreUnreachableError(StoreError):
    """The server of the database does not answer."""


class StudyNotFoundError(StoreError):
    """The database holds no study of this name."""


class CheckpointError(StoreError):
    """A checkpoint is missing, truncated or altered."""


class TrainingError(ThriftyError):
    """Training of one stage failed."""


class DivergedError(TrainingError):
    """A loss or a metric is no longer finite."""


class WorkerLostError(TrainingError):
    """A worker process ended unexpectedly."""


class PackMismatchError(TrainingError):
    """A packed model differs from the same model trained alone, and this cannot be undone."""


class PeerLostError(TrainingError):
    """Another worker of a job is gone; the remaining workers may continue."""


class TooFewWorkersError(TrainingError):
    """Too few workers of a job are left."""


class MissingExtraError(ThriftyError, ImportError):
    """An optional dependency is not installed, or cannot be imported."""

    def __init__(self, package: str, *, extra: str, cause: str = "") -> None:
        super().__init__(
            f"{package} cannot be imported ({cause}); install it again, for example by: "
            f"pip install --force-reinstall {package}"
            if cause
            else f"{package} is not installed; run: pip install {package} "
            f"(or, in the checkout of thrifty: pip install -e '.[{extra}]')"
        )


def require(module: str, *, extra: str, package: str | None = None) -> Any:
    """Import a module of an optional dependency.

    Args:
        module: The module, such as ``"scipy.optimize"``.
        extra: The extra of thrifty that installs it.
        package: The name under which it is installed, where that is not the module's first part.

    Raises:
        MissingExtraError: It is not installed, or its installation is broken.

    >>> require("json", extra="none").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        is_missing = name is not None and name.partition(".")[0] == top
        raise MissingExtraError(
            package or top, extra=extra, cause="" if is_missing else str(error)
        ) from error
