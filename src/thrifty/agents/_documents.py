"""The JSON documents that commands print with ``--json``, as types, and how they are written.

``docs/reference/json.md`` is made from this module.
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


# -- studies in a database --------------------------------------------------------------------

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
    seconds: float
    """Seconds of training."""
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
    """The artefacts of its trials, by trial and name."""


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


# -- studies in a file ------------------------------------------------------------------------


class UnitDocument(TypedDict):
    """The unit in which a study counts."""

    name: str
    """One of "epochs", "steps" and "tokens"."""
    per_epoch: int
    """How many of them an epoch is."""


class MemoryDocument(TypedDict):
    """The memory that trials need."""

    capacity_bytes: float
    """Memory that trials may take."""
    place: str
    """Where it is."""
    base_bytes: int
    """Frozen parameters that all trials share."""
    trial_bytes: list[float]
    """What the smallest and the largest trial add."""
    trials_at_once: int
    """Trials that certainly fit together, with one base for all."""
    trials_at_once_alone: int
    """Trials that certainly fit together if each has a base of its own."""


class PlanDocument(Document):
    """Printed by ``thrifty plan``. Numbers are means over simulations unless ``exact``."""

    study: str
    """Name of the study."""
    unit: UnitDocument
    """The unit of the study; the numbers of this document are epochs."""
    num_trials: int
    """Trials of the study."""
    trial_epochs: float
    """Epochs that the trials would train one by one."""
    unique_epochs: float
    """Epochs that are left when equal prefixes are trained once."""
    unique_epochs_low: int
    """The least of them in any simulation."""
    unique_epochs_high: int
    """The most of them in any simulation."""
    exact: bool
    """Whether these numbers do not depend on results."""
    merge_rate: float
    """``trial_epochs / unique_epochs``."""
    known_epochs: float
    """Unique epochs that are trained already."""
    evaluated_epochs: float
    """Unique epochs whose states are kept, and which are only evaluated again."""
    epochs_to_train: float
    """Unique epochs that are left to train."""
    seconds: float | None
    """Seconds of all unique epochs; null if no epoch of the task was timed yet."""
    seconds_to_train: float | None
    """Seconds of the epochs that are left to train."""
    memory: MemoryDocument | None
    """Memory of the trials; null if it is not forecast."""
    choice: str
    """What ``Auto`` has chosen, and why; empty for other algorithms."""


class SavingsDocument(TypedDict):
    """What sharing and packing saved; see ``thrifty.Savings``."""

    trial_epochs: int
    """Epochs that the trials would have trained one by one."""
    unique_epochs: int
    """Epochs that are left when equal prefixes are trained once."""
    evaluated_epochs: int
    """Epochs that were only evaluated again."""
    retrained_epochs: int
    """Epochs that were trained again because a state was not kept."""
    packed_epochs: int
    """Epochs that were trained in a pack."""
    seconds: float
    """Seconds of training."""
    seconds_checks: float
    """Those of them that went into checks."""
    seconds_alone: float | None
    """Seconds that the trials would have taken one by one; null if not measured."""
    shared_factor: float | None
    """Factor by which sharing reduced the time; null if not measured."""
    packed_factor: float | None
    """Factor by which packing reduced it further; null if not measured."""


class ResultDocument(Document):
    """Printed by ``thrifty run``, ``thrifty resume`` and ``thrifty demo``."""

    study: str
    """Name of the study."""
    num_trials: int
    """Trials so far."""
    trials: dict[str, int]
    """Trials by state."""
    done: bool
    """Whether nothing is left to train; if not, another run goes on."""
    signal: int | None
    """The signal that stopped the run, such as 2 for Ctrl-C; null if none did."""
    best: list[TrialDocument]
    """The best trial, or the Pareto front; empty if no trial has reported."""
    errors: list[FailureDocument]
    """Errors of trials, the most frequent first."""
    savings: SavingsDocument
    """What was saved."""
    written: list[str]
    """Files that were written."""


class ConfigCost(TypedDict):
    """What is known of a configuration."""

    config: dict[str, Any]
    """The configuration, with all hyper-parameters."""
    known_epochs: int
    """Its first epochs that are trained already."""
    epochs: int
    """Epochs of its training."""
    trained_by: list[str]
    """Studies that trained the known epochs."""
    metrics: dict[str, float | None] | None
    """Metrics after the last known epoch; null if none is known."""


class CostDocument(Document):
    """Printed by ``thrifty cost``."""

    study: str
    """Name of the study whose task is trained."""
    unit: UnitDocument
    """The unit of the study; the numbers of this document are epochs."""
    configs: list[ConfigCost]
    """The configurations, in the order in which they were given."""
    trial_epochs: float
    """Epochs that they take one by one."""
    unique_epochs: float
    """Epochs that are left when equal prefixes are trained once."""
    known_epochs: float
    """Unique epochs that are trained already."""
    evaluated_epochs: float
    """Unique epochs whose states are kept, and which are only evaluated again."""
    epochs_to_train: float
    """Unique epochs that are left to train."""
    seconds_to_train: float | None
    """Seconds that they take; null if no epoch of the task was timed yet."""


class BranchDocument(Document):
    """Printed by ``thrifty branch``."""

    study: str
    """Name of the study."""
    trial: int
    """Number of the trial that it branches off."""
    epoch: int
    """Epochs that both have in common."""
    config: dict[str, Any]
    """The hyper-parameters of the branch."""
    known_epochs: int
    """How many of its first epochs are known."""
    kept_epoch: int
    """The last of these whose state is kept; 0 if none is."""
    epochs_again: int
    """Known epochs that are trained again, because no later state is kept."""
    epochs_to_train: int
    """All epochs that are trained for it, of all seeds."""
    enqueued: bool
    """Whether it is enqueued now; only with --yes."""


class EnqueuedDocument(Document):
    """Printed by ``thrifty enqueue``."""

    study: str
    """Name of the study."""
    config: dict[str, Any]
    """The configuration, with all hyper-parameters."""
    known_epochs: int
    """How many of its first epochs are known."""


class ExtensionDocument(Document):
    """Printed by ``thrifty extend``."""

    study: str
    """Name of the study."""
    before: int
    """How many epochs it trained a trial before (``max_epochs``)."""
    after: int
    """How many epochs it trains a trial then."""
    num_trials: int
    """How many trials have ended before and may go on."""
    known_epochs: int
    """Epochs of these trials that are known; shared ones count once."""
    epochs_again: int
    """Known epochs that are trained again, because no later state is kept."""
    most_epochs_to_train: int
    """Epochs to train if all of these trials go on, of all seeds."""
    extended: bool
    """Whether the study is extended now; only with --yes."""
    queued: bool
    """Whether the process that runs the study was asked to do so; only with --yes."""


class ActDocument(Document):
    """A request to a study, printed by ``thrifty stop``, ``pause``, ``note`` and ``tag``.

    ``thrifty resume`` prints it for a study that a process has paused, and the tool ``stop_study``
    answers with it.
    """

    study: str
    """Name of the study."""
    act: ActOfStudy
    """The request."""


class ActsDocument(Document):
    """Printed by ``thrifty acts``."""

    study: str
    """Name of the study."""
    acts: list[ActOfStudy]
    """All requests to it, the oldest first."""


class ActOfStudy(TypedDict):
    """A request to a study."""

    kind: Literal[
        "stop",
        "stop trial",
        "pause",
        "resume",
        "lengthen",
        "branch",
        "enqueue",
        "extend",
        "note",
        "tag",
        "untag",
    ]
    """Its kind; "lengthen": a request for a larger max_epochs, "extend": the study was made longer,
    "branch": a branch of a trial was enqueued, "enqueue": a configuration that was made from
    that of a trial."""
    trial: int | None
    """Number of the trial that it is about; null for the whole study."""
    text: str
    """The note, the tag, or the requested max_epochs."""
    who: str
    """The user and the machine."""
    at: float
    """When, in seconds since 1970 (UTC)."""
    queued: bool
    """Whether it waits for a process that runs the study."""
    answer: str
    """The reason if it could not be done, else empty."""


class TriedTrial(TrialDocument):
    """A configuration that was tried, its results, and where they come from."""

    trained_by: list[str]
    """Studies that have trained its epochs; a repeated configuration has those of before."""


class TriedDocument(Document):
    """Printed by ``thrifty try``."""

    study: str
    """Name of the study that has these configurations as trials."""
    metric: list[str]
    """The objectives."""
    mode: list[str]
    """Whether each of them is maximised ("max") or minimised ("min")."""
    done: bool
    """Whether nothing is left to train; if not, the same command goes on."""
    signal: int | None
    """The signal that stopped the run; null if none did."""
    trials: list[TriedTrial]
    """The configurations that have a trial, in the order in which they were given."""
    errors: list[FailureDocument]
    """Errors of these trials."""
    savings: SavingsDocument
    """What was saved, in all runs of this study."""


class ImportanceDocument(Document):
    """Printed by ``thrifty importance``."""

    study: str
    """Name of the study."""
    metric: str
    """The metric that is explained."""
    method: str
    """How it is explained."""
    basis: str
    """Which trials are compared, at which epoch."""
    shares: dict[str, float]
    """Share of each hyper-parameter in the differences between trials, the largest first."""


# -- files, pages, machines ---------------------------------------------------------------------


class WrittenDocument(Document):
    """Printed by ``thrifty plot`` and ``thrifty export``."""

    study: str
    """Name of the study."""
    written: list[str]
    """Files that were written."""


class DashboardDocument(Document):
    """Printed by ``thrifty dashboard`` when the page can be opened; it runs until Ctrl-C."""

    storage: str
    """Address of the database, without its password."""
    address: str
    """Address of the page, with its token if it needs one."""


class CompletionDocument(Document):
    """Printed by ``thrifty completion``."""

    shell: str
    """Name of the shell."""
    script: str
    """The script that it evaluates."""


class CheckDocument(TypedDict):
    """The result of one check of ``thrifty doctor``."""

    section: str
    """What the check belongs to: "versions", "devices", ..."""
    name: str
    """Name of what was checked."""
    state: Literal["ok", "absent", "warning", "broken"]
    """The result."""
    detail: str
    """What was found, and how to mend it."""
    needed: bool
    """Whether every study or a given option needs it."""


class DoctorDocument(Document):
    """Printed by ``thrifty doctor``; the exit code is 1 if it is not ok."""

    ok: bool
    """Whether every required check passed."""
    checks: list[CheckDocument]
    """The checks, in order."""


class OfferDocument(TypedDict):
    """A machine that can be rented."""

    cloud: str
    """Name of the cloud."""
    region: str
    """Region, and zone if prices differ between zones."""
    instance_type: str
    """The cloud's name of the machine."""
    accelerator: str
    """Name of the GPU; empty for none."""
    accelerator_count: float
    """How many of them."""
    price_usd_h: float | None
    """Price of an hour on demand; null if it is not offered."""
    spot_usd_h: float | None
    """Price of an hour as a spot machine; null if it is not offered."""
    baseline_gbps: float | None
    """Network rate that it can always have; null if it is not known."""
    peak_gbps: float | None
    """Highest network rate; null if it is not known."""
    priced_on: str | None
    """Date of the price."""


class CatalogueDocument(Document):
    """Printed by ``thrifty catalogue show``."""

    source: str
    """Where the prices are from."""
    offers: list[OfferDocument]
    """All offers, the cheapest first."""


class CloudPrices(TypedDict):
    """How old the prices of a cloud are."""

    cloud: str
    """Name of the cloud."""
    num_offers: int
    """Its offers."""
    oldest: str | None
    """Date of the oldest price; null if no price has a date."""
    newest: str | None
    """Date of the newest price."""


class RefreshDocument(Document):
    """Printed by ``thrifty catalogue refresh``."""

    clouds: list[CloudPrices]
    """One row for each cloud."""


class Forecast90(TypedDict):
    """A forecast with its interval of 90 %."""

    low: float
    """Low end."""
    median: float
    """Median."""
    high: float
    """High end."""


class MachineDocument(TypedDict):
    """Some equal machines of a fleet."""

    cloud: str
    """Name of the cloud."""
    region: str
    """Region."""
    zone: str
    """Zone; empty if any will do."""
    instance_type: str
    """The cloud's name of the machine."""
    accelerator: str
    """Name of the GPU; empty for none."""
    accelerator_count: float
    """GPUs of each machine."""
    num: int
    """How many machines."""
    device_batch: int
    """Samples of a step on each device."""
    micro_batches: int
    """Parts of a step, one after the other."""
    precision: str | None
    """Precision of the training; null for that of the profile."""
    spot: bool
    """Whether they are spot machines."""
    usd_h: float
    """Price of an hour of one of them."""


class FleetDocument(TypedDict):
    """A fleet, and what training on it takes."""

    machines: list[MachineDocument]
    """Its machines."""
    step_s: Forecast90
    """Seconds of a step."""
    time_s: Forecast90
    """Seconds of the whole training."""
    cost_usd: Forecast90
    """Its cost."""
    checkpoint_s: float | None
    """Seconds between checkpoints; null if none are needed."""
    why: str
    """What limits it."""


class CloseCallDocument(TypedDict):
    """Another choice that is about as good."""

    factor: float
    """Factor of the profile's error at which the choice changes."""
    fleet: FleetDocument | None
    """The other choice; null for none."""


class ProbeDocument(TypedDict):
    """A measurement that is worth its price."""

    instance_type: str
    """The machine to rent."""
    where: str
    """Where."""
    num: int
    """How many of them."""
    spot: bool
    """Whether as spot machines."""
    finds: list[str]
    """What it measures."""
    usd: float
    """What it costs."""
    seconds: float
    """How long it takes."""
    gain: float
    """What it is expected to save, in dollars or seconds."""
    why: str
    """Why it is worth it."""


class RentDocument(Document):
    """Printed by ``thrifty rent``."""

    best: FleetDocument | None
    """The choice; null without ``--deadline`` or ``--budget``."""
    front: list[FleetDocument]
    """All fleets that no other is cheaper and faster than."""
    num_considered: int
    """Fleets that were considered."""
    close_calls: list[CloseCallDocument]
    """Choices that are about as good."""
    notes: list[str]
    """What the choice rests on."""
    probes: list[ProbeDocument]
    """What is worth measuring first, in order; empty without ``--probe``."""
    probes_ended: str
    """Why there are no further probes."""


DOCUMENTS: Mapping[str, type] = {
    "run": ResultDocument,
    "resume": ResultDocument,
    "demo": ResultDocument,
    "plan": PlanDocument,
    "cost": CostDocument,
    "try": TriedDocument,
    "status": StatusDocument,
    "best": BestDocument,
    "artifacts": ArtifactsDocument,
    "logs": LogsDocument,
    "branch": BranchDocument,
    "enqueue": EnqueuedDocument,
    "extend": ExtensionDocument,
    "stop": ActDocument,
    "pause": ActDocument,
    "note": ActDocument,
    "tag": ActDocument,
    "acts": ActsDocument,
    "delete": DeleteDocument,
    "restore": RestoreDocument,
    "gc": GcDocument,
    "explain": ExplainDocument,
    "importance": ImportanceDocument,
    "plot": WrittenDocument,
    "export": WrittenDocument,
    "rent": RentDocument,
    "catalogue show": CatalogueDocument,
    "catalogue refresh": RefreshDocument,
    "dashboard": DashboardDocument,
    "doctor": DoctorDocument,
    "completion": CompletionDocument,
}
"""The document of each command."""


class KnownEpochDocument(TypedDict):
    """An epoch of a configuration that is trained already."""

    epoch: int
    """The epoch, from 1."""
    metrics: dict[str, float | None]
    """The metrics after it."""
    studies: list[str | None]
    """The studies that trained it, several only with several seeds; null for a deleted one."""
    kept: bool
    """Whether the state after it is kept, so that training can go on from there."""


class KnownDocument(Document):
    """Answered by the tool ``known``."""

    study: str
    """Name of the study whose task is trained."""
    config: dict[str, Any]
    """The configuration, with all hyper-parameters."""
    epochs: list[KnownEpochDocument]
    """Its first epochs, as far as they are trained."""


class DomainDocument(TypedDict):
    """A hyper-parameter of a space."""

    name: str
    """Its name."""
    domain: str
    """Its values, as Python writes the domain."""
    example: Any
    """One of its values, as configurations write it."""


class SpaceDocument(Document):
    """Answered by the tool ``space``."""

    study: str
    """Name of the study."""
    metric: list[str]
    """The objectives."""
    mode: list[str]
    """Whether each of them is maximised ("max") or minimised ("min")."""
    max_epochs: int
    """How long the study trains a trial."""
    hyper_parameters: list[DomainDocument]
    """The hyper-parameters of a configuration."""


class BudgetDocument(TypedDict):
    """What an agent may train, and what it has trained."""

    allowed: bool
    """Whether it may train at all."""
    max_epochs: float | None
    """Epochs that all runs together may train; null for any number."""
    used_epochs: int
    """Epochs that they have trained."""
    max_seconds: float | None
    """Seconds that all runs together may train; null for any number."""
    used_seconds: float
    """Seconds that they have trained."""


class JobDocument(Document):
    """Answered by the tools ``run``, ``job`` and ``stop``."""

    job: str
    """Identifier of the job."""
    state: Literal["running", "done", "stopped", "failed"]
    """Its state; a stopped job has trained a part."""
    study: str
    """The study that has its configurations as trials."""
    seconds: float
    """Seconds since it started."""
    progress: StudyStatus | None
    """State of that study; null before it is in the database."""
    result: TriedDocument | None
    """Its results; null while it runs and after an error."""
    error: ErrorMessage | None
    """Why it failed."""
    log: str
    """The last lines of its log."""
    budget: BudgetDocument
    """What is left to train."""


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
