"""What all JSON documents share, and documents about studies in a database.

These are states, best trials, files, log lines and deletion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on only


SCHEMA_VERSION: Literal[1] = 1
"""Version of all documents; it rises when a field changes its meaning or goes."""


class Document(TypedDict):
    """The fields that all documents have."""

    schema_version: Literal[1]
    """Version of the schema."""


# -- errors ---------------------------------------------------------------------------------


class ErrorMessage(TypedDict):
    """What went wrong."""

    kind: str
    """Name of the exception, such as "UsageError"."""
    message: str
    """What is wrong, and how to mend it."""


class ErrorDocument(Document):
    """Printed by any command that fails; the exit code is 2, or 1 for a defect of thrifty."""

    error: ErrorMessage
    """The error."""


def error_document(error: Exception, message: str) -> ErrorDocument:
    """Return an error as a document."""
    found: ErrorMessage = {"kind": type(error).__name__, "message": message}
    return {"schema_version": SCHEMA_VERSION, "error": found}


def to_json(document: Mapping[str, Any]) -> str:
    r"""Return a document as JSON, in ASCII; numbers that are not finite become ``null``.

    >>> to_json({"schema_version": 1, "value": float("nan"), "name": "\u00e9"})
    '{"schema_version": 1, "value": null, "name": "\\u00e9"}'
    """
    return json.dumps(finite(document), allow_nan=False)


def finite(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are None, and tuples are lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(each) for each in value]
    return value


Amounts: TypeAlias = dict[str, float]
"""A number of epochs in all units that a study counts in: ``{"epochs": 10, "steps": 5000}``."""


class BestValue(TypedDict):
    """The best trial of a study so far."""

    trial: int
    """Number of the trial."""
    value: float | None
    """Its metric, as far as it has come."""
    reached: Amounts
    """How far it has come, in epochs and in the study's unit."""


class FailureDocument(TypedDict):
    """Trials that failed with the same error."""

    trials: list[int]
    """Numbers of the trials."""
    message: str
    """The error of the first of them."""
    traceback: str
    """Its traceback; empty without ``--traceback``, or if no code raised it."""


class WorkerDocument(TypedDict):
    """What a worker has done for the task of a study, as far as it was measured."""

    worker: str
    """Its name."""
    device: str | None
    """Its device; null if it was not recorded."""
    num_stages: int
    """How many stages it has trained."""
    busy_s: float
    """Seconds in which it trained at least one stage."""
    seconds: float
    """Seconds from the beginning of its first stage to the end of its last."""
    peak_bytes: int | None
    """Peak memory of its process: on a GPU what PyTorch has allocated there, else resident memory;
    null if it was not measured."""


class RemainingDocument(TypedDict):
    """What a study was asked for and has not trained yet."""

    max_epochs: Amounts | None
    """How long the study trains a trial; null if that is not recorded."""
    num_trials: int
    """Trials that have not reached the end of their training."""
    most: Amounts
    """What they have left at most: sharing saves a part, and an algorithm may stop trials."""
    num_enqueued: int
    """Enqueued configurations that were not tried yet."""
    requested_max_epochs: int | None
    """The largest ``max_epochs`` that is queued for the study; null if none is."""


class StudyStatus(TypedDict):
    """The state of one study."""

    name: str
    """Name of the study."""
    state: str
    """One of "running", "paused", "stopped", "done" and "interrupted" (its process is gone)."""
    metric: str
    """The metric that is optimised; the first of several."""
    num_trials: int
    """Trials so far."""
    trials: dict[str, int]
    """Trials by state: "done", "running", "paused", "stopped", "failed"."""
    stopped_in_training: int
    """Trials that were in training when the study stopped; the next run goes on with them."""
    best: BestValue | None
    """The best trial; null if there is none."""
    num_infeasible: int
    """Trials that break a constraint, in a study without a best trial."""
    requested: Amounts
    """Sum over the study's trials of how far each has come."""
    trained: Amounts
    """What all studies of this task together have really trained."""
    trained_by_study: Amounts
    """What the study's own runs have trained, epochs that were trained again included."""
    seconds: float
    """Seconds of training, by all studies of this task together."""
    seconds_by_study: float
    """Seconds of training by the study's own runs."""
    remaining: RemainingDocument
    """What the study was asked for and has not trained yet."""
    seeds: int
    """Seeds of each configuration; values are means over them."""
    errors: list[FailureDocument]
    """Errors of trials, the most frequent first."""
    workers: list[WorkerDocument] | None
    """What trained, for all studies of this task together; null without ``--name``."""


class StatusDocument(Document):
    """Printed by ``thrifty status``."""

    storage: str
    """Address of the database, without its password."""
    studies: list[StudyStatus]
    """The studies, oldest first."""


class TrialFile(TypedDict):
    """A file that a trial has logged with ``log_artifact``."""

    name: str
    """Its name."""
    digest: str
    """The BLAKE2b digest of its content, in hexadecimal digits."""
    num_bytes: int
    """Its size."""
    error: str
    """Why it was not stored, such as a full disk; empty if it was."""


class TrialDocument(TypedDict):
    """A trial and its results."""

    number: int
    """Number of the trial."""
    state: str
    """One of "done", "running", "paused", "stopped" and "failed"."""
    value: float | None
    """The first metric at the epoch that the trial has reached."""
    values: dict[str, float | None]
    """All objectives there, by name."""
    reached: Amounts
    """How far the trial has come, in epochs and in the study's unit."""
    config: dict[str, Any]
    """Its hyper-parameters; a schedule is an object with "schedule" and its arguments."""
    sd: float | None
    """Standard deviation over the seeds; null for one seed."""
    seeds: int
    """Seeds that have reported."""
    certainty: float | None
    """Probability that this is the trial with the best true mean; null if it is not known."""
    user_attrs: dict[str, Any]
    """What the trial has set with ``set_user_attr``; of each key, the last value."""
    artifacts: list[TrialFile]
    """What it has logged with ``log_artifact``; ``thrifty artifacts --save`` copies these files."""


class BestDocument(Document):
    """Printed by ``thrifty best``."""

    study: str
    """Name of the study."""
    metric: list[str]
    """The objectives."""
    mode: list[str]
    """Whether each of them is maximised ("max") or minimised ("min")."""
    trials: list[TrialDocument]
    """The best trial, or all trials of the Pareto front."""


class ArtifactDocument(TypedDict):
    """A file that a trial has logged."""

    trial: int
    """Number of the trial."""
    name: str
    """Its name."""
    digest: str
    """The BLAKE2b digest of its content, in hexadecimal digits."""
    num_bytes: int
    """Its size."""
    error: str
    """Why it was not stored, such as a full disk; empty if it was."""
    saved: str | None
    """The file that ``--save`` has written; null without it, or if there is none."""
    save_error: str
    """Why ``--save`` has not written it, such as damage; empty if it has."""


class ArtifactsDocument(Document):
    """Printed by ``thrifty artifacts``."""

    study: str
    """Name of the study."""
    artifacts: list[ArtifactDocument]
    """The artifacts of its trials, by trial and name."""


class LogLineDocument(TypedDict):
    """A line that user code has logged."""

    epoch: int
    """The epoch in which it was logged, from 1."""
    at: float
    """When, in seconds since 1970 (UTC)."""
    level: str
    """Its level, such as "WARNING"."""
    logger: str
    """Name of the logger."""
    text: str
    """The message, with unprintable characters escaped."""


class LogsDocument(Document):
    """Printed by ``thrifty logs``."""

    study: str
    """Name of the study."""
    trial: int
    """Number of the trial."""
    lines: list[LogLineDocument]
    """What it has logged, in order; a shared epoch's lines are of all trials that share it."""


class ExplainDocument(Document):
    """Printed by ``thrifty explain``."""

    studies: list[str]
    """Names of the two studies."""
    shares: Literal["everything", "training", "nothing"]
    """What they share: all results; trained states, but no metrics; or nothing."""
    why: str
    """The same in words."""
    differences: list[str]
    """What differs between them."""


class DeleteDocument(Document):
    """Printed by ``thrifty delete``; it needs ``--yes``."""

    deleted: str
    """Name of the study."""
    num_trials: int
    """How many trials it has."""


class DeletedStudy(TypedDict):
    """A deleted study that can be restored."""

    name: str
    """Its name."""
    num_trials: int
    """How many trials it has."""
    who: str
    """The user and the machine that deleted it."""
    at: float
    """When, in seconds since the epoch of Unix."""


class RestoreDocument(Document):
    """Printed by ``thrifty restore``."""

    restored: str | None
    """Name that the study has now; null if no name was given."""
    deleted: list[DeletedStudy]
    """The deleted studies that can be restored now, the oldest first."""


class GcDocument(Document):
    """Printed by ``thrifty gc``."""

    dry_run: bool
    """Whether nothing was removed."""
    studies: list[DeletedStudy]
    """The deleted studies that cannot be restored any more."""
    num_states: int
    """States of trials that were removed, because no study needs them."""
    num_bytes: int
    """Bytes of all files that were removed."""
    num_elsewhere: int
    """States that no study needs, but whose files are in another folder."""
    num_busy: int
    """Plans that were left alone, because a process trains them."""
