"""Records that the store writes and reads: frozen dataclasses, one for each kind of row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Row

from thrifty.core import Artifact, CheckpointRef, LogLine, artifact_from_json
from thrifty.space import Timeline, TimeUnit
from thrifty.space._units import EPOCHS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of a plan.

    ``config``, ``epochs`` and ``replica`` are the timeline of the trial that added it.
    """

    plan: int
    node: int
    parent: int | None
    start: int
    config: Mapping[str, Any]
    epochs: int
    replica: int = 0

    @property
    def timeline(self) -> Timeline:
        """The timeline of the trial that added the node."""
        return Timeline(self.config, epochs=self.epochs, replica=self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """The metrics of a node after an epoch; the store keeps the first record of an epoch.

    ``seconds``, ``seconds_checks``, ``seconds_alone`` with its low and high ends, ``evaluated``,
    ``attributes`` and ``artifacts`` are those of ``EpochDone``. ``study`` is the study whose run
    trained the epoch.
    ``again`` is how often the epoch was trained again since. The fields that begin with ``again_``
    are the sums of the same times over those repetitions. They are only read; ``EpochAgain`` adds
    to them. Their low and high ends are None if a part of ``again_alone_s`` was not measured.
    """

    plan: int
    node: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    worker: str
    seconds_checks: float = 0.0
    seconds_alone: float | None = None
    seconds_alone_low: float | None = None
    seconds_alone_high: float | None = None
    study: int | None = None
    evaluated: bool = False
    again: int = 0
    again_s: float = 0.0
    again_checks_s: float = 0.0
    again_alone_s: float = 0.0
    again_alone_low_s: float | None = 0.0
    again_alone_high_s: float | None = 0.0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAgain:
    """A known epoch was trained again, because a state after it was not stored."""

    plan: int
    node: int
    epoch: int
    seconds: float
    seconds_checks: float = 0.0
    seconds_alone: float | None = None
    seconds_alone_low: float | None = None
    seconds_alone_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalRecord:
    """A check failed, so trials of this structure are no longer fused; the first record is kept.

    Attributes:
        plan: Plan of the trials.
        key: Identifier of the structure, equal in every process.
        reason: What differed, and by how much.
        study: Study in whose run the check failed.
    """

    plan: int
    key: str
    reason: str
    study: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAdded:
    """A state was stored; a later one of the same node and epoch replaces it."""

    plan: int
    ref: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved:
    """A stored state was removed."""

    plan: int
    node: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """The time that a worker spent on a stage, and how the stage ended.

    ``device`` and ``peak_bytes`` are those of ``DeviceUse``; None if nothing was measured.
    """

    plan: int
    node: int
    start: int
    stop: int
    worker: str
    state: str
    started_at: float
    seconds: float
    error: str
    device: str | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnqueued:
    """The user enqueued a configuration to try next; ``place`` in the queue counts from 0."""

    study: int
    place: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAsked:
    """A trial was asked to train up to epoch ``target``; ``config`` is set only for a new trial.

    ``node`` is where its first replica ends, ``replicas`` where the others end. ``horizon`` is the
    epoch at which the training of a new trial ends (None: at the study's ``max_epochs``).
    """

    study: int
    trial: int
    target: int
    config: Mapping[str, Any] | None
    group: Any
    parent: tuple[int, int] | None
    node: int
    replicas: tuple[int, ...] = ()
    horizon: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStopped:
    """A trial was pruned."""

    study: int
    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReported:
    """A trial reached its target with this value of the study's metric.

    ``objectives`` contains all metrics if the study has several. ``violation`` is the amount by
    which the trial violates the study's constraints (None: the study has no constraints).
    """

    study: int
    trial: int
    epoch: int
    value: float
    objectives: Mapping[str, float] | None = None
    violation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailed:
    """A trial failed and will not reach its target."""

    study: int
    trial: int
    epoch: int
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMoved:
    """A study changed its state to "running", "paused", "stopped" or "done"."""

    study: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActApplied:
    """The process that runs a study has applied an act; ``answer`` says what else came of it."""

    act: int
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesLogged:
    """User code has logged lines in an epoch of a node; the last ``max_bytes`` of a node stay."""

    plan: int
    node: int
    epoch: int
    lines: tuple[LogLine, ...]
    max_bytes: int


Record = (
    StudyMoved
    | ActApplied
    | NodeRecord
    | EpochRecord
    | EpochAgain
    | LinesLogged
    | RefusalRecord
    | CheckpointAdded
    | CheckpointRemoved
    | StageRecord
    | TrialEnqueued
    | TrialAsked
    | TrialStopped
    | TrialReported
    | TrialFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInfo:
    """A search plan: everything trained for one task and seed.

    ``family`` is equal for plans that train the same and differ only in their metrics. It is None
    for a plan that an older version made.
    """

    id: int
    identity: str
    task: str
    created_at: float
    family: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecords:
    """All records of a plan, or the new ones; nodes are in the order in which they were added.

    ``revision`` is the plan's revision when it was read: no record up to it is missing.
    """

    nodes: list[NodeRecord]
    epochs: list[EpochRecord]
    checkpoints: list[CheckpointRef]
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Epochs ``start + 1 .. stop`` of a node that another driver is training."""

    node: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Records that other drivers added to a plan since the last read, and all their claims."""

    news: PlanRecords
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInfo:
    """A study; ``spec`` is its specification, ``state`` is "running", "paused",
    "stopped" or "done"."""

    id: int
    name: str
    plan: int
    spec: Mapping[str, Any]
    state: str
    created_at: float

    @property
    def num_seeds(self) -> int:
        """The number of seeds that each configuration is trained with."""
        return int(self.spec.get("seeds", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """The current state of a trial; ``error`` is its kind, message and traceback.

    ``objectives`` and ``violation`` are those of ``TrialReported``, ``node``, ``replicas`` and
    ``horizon`` those of ``TrialAsked``.
    """

    number: int
    config: Mapping[str, Any]
    node: int
    group: Any
    parent: tuple[int, int] | None
    state: str
    target: int
    reached: int
    value: float | None
    error: tuple[str, str, str]
    objectives: Mapping[str, float] | None = None
    violation: float | None = None
    replicas: tuple[int, ...] = ()
    horizon: int | None = None

    @property
    def feasible(self) -> bool:
        """Whether the trial satisfies the study's constraints."""
        return not self.violation


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorRecord:
    """A trial of an earlier study from which a study may learn.

    ``metrics`` are those after epochs 1, 2, ...
    """

    config: Mapping[str, Any]
    state: str
    target: int
    metrics: Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One entry of a study's log.

    ``kind`` is "enqueued", "asked", "stopped", "reported" or "failed". For "enqueued", ``config``
    is the enqueued configuration and ``trial`` is its place in the queue.
    """

    kind: str
    trial: int
    epoch: int
    value: float | None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecords:
    """All trials of a study, and its log in chronological order."""

    trials: list[TrialRecord]
    log: list[LogRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot:
    """A study and its plan as they were at one moment.

    ``threads`` are the CPU threads of each worker of the plan; None if no run has fixed them.
    """

    threads: int | None
    plan: PlanRecords
    study: StudyRecords
    priors: Sequence[PriorRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What a study has been asked for and has not trained yet.

    Attributes:
        max_epochs: How long the study trains a trial; None if that is not recorded.
        raised_from: The ``max_epochs`` before it was last raised; None if it never was.
        num_trials: Trials that have not reached the end of their training.
        most_epochs: Epochs that these trials have left, those of all seeds. An algorithm that
            stops trials early trains fewer, and sharing saves some of them.
        num_enqueued: Enqueued configurations that the study has not tried yet.
        requested_max_epochs: The largest ``max_epochs`` that is queued for the study; None without
            such a request.
        file: The file that defines the study; None if that is not recorded.
    """

    file: str | None = None
    max_epochs: int | None = None
    raised_from: int | None = None
    num_trials: int = 0
    most_epochs: int = 0
    num_enqueued: int = 0
    requested_max_epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """A summary of a study.

    ``id`` is its id in the database. ``num_trials`` counts trials by state, and ``num_done`` those
    that reached ``max_epochs``. ``state`` is "interrupted" if the study was running and its process
    is gone. ``best_value`` is the value of the best trial (see ``best_trials``) at ``best_epochs``,
    the epoch it has reached. ``num_infeasible`` counts the trials that have a value and break a
    constraint; it is 0 where there is a best trial. With ``num_seeds`` above 1, values are means.

    ``plan_epochs`` and ``plan_seconds`` count what all studies of the plan have trained;
    ``trained_epochs`` and ``seconds`` what the study's own runs have, epochs that were trained
    again included.
    """

    id: int
    name: str
    state: str
    metric: str
    num_trials: Mapping[str, int]
    num_done: int
    best_value: float | None
    best_trial: int | None
    best_epochs: int | None
    num_infeasible: int
    trial_epochs: int
    plan_epochs: int
    plan_seconds: float
    trained_epochs: int
    seconds: float
    last_activity: float | None
    remaining: Remaining
    unit: TimeUnit = EPOCHS
    """The unit in which the study shows what it trains."""
    num_seeds: int = 1


_Made = TypeVar("_Made")


def nodes_of_replicas(stored: Sequence[int] | None) -> tuple[int, ...]:
    """Return the nodes of a trial's replicas after the first, as a column of the trials has them.

    >>> nodes_of_replicas(None), nodes_of_replicas([4, 7])
    ((), (4, 7))
    """
    return tuple(stored or ())


def attributes_of(stored: str | None) -> dict[str, Any]:
    """Return the attributes of an epoch, as a column of the epochs has them.

    >>> attributes_of(None), attributes_of('{"note": "warm"}')
    ({}, {'note': 'warm'})
    """
    return {} if stored is None else json.loads(stored)


def artifacts_of(stored: str | None) -> tuple[Artifact, ...]:
    """Return the artifacts of an epoch, as a column of the epochs has them.

    >>> artifacts_of(None)
    ()
    """
    return () if stored is None else tuple(artifact_from_json(each) for each in json.loads(stored))


def artifacts_by_name(stored: str) -> dict[str, Artifact]:
    """Return the artifacts of an epoch by name, as a column of the epochs has them."""
    return {each.name: each for each in artifacts_of(stored)}


def records_of(
    kind: type[_Made], rows: Sequence[Row[Any]], **decode: Callable[[Any], Any]
) -> list[_Made]:
    """Return records from rows whose columns are named like the fields of the records.

    Args:
        kind: The class of the records.
        rows: The rows of one query; columns that are no fields are left out.
        decode: A function for each field that the database holds in another form.

    Raises:
        ValueError: A field has no column; its default would hide what the database has.
    """
    if not rows:
        return []
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    read = itemgetter(*(rows[0]._fields.index(name) for name in names))
    out = []
    for row in rows:
        values = dict(zip(names, read(row), strict=True))
        for name, function in decode.items():
            values[name] = function(values[name])
        out.append(kind(**values))
    return out
