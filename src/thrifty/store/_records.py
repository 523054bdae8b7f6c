"""What is written down, and what is read back: frozen values, one for each kind of row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.core import CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of a plan; ``config`` and ``epochs`` are the timeline of the trial that made it."""

    plan: int
    node: int
    parent: int | None
    start: int
    config: Mapping[str, Any]
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """The metrics of a node after an epoch; the first record of an epoch stays.

    ``seconds``, ``seconds_checks``, ``seconds_alone`` with its ends, and ``evaluated`` are those of
    ``EpochDone``; ``study`` is the one whose run trained it. ``again`` is how often it was trained
    again since. The fields that begin with ``again_`` are the sums of the same times; they are only
    read (see ``EpochAgain``). Their ends are None if a part of ``again_alone_s`` was not measured.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAgain:
    """An epoch that was known already had to be trained again, because a state after it was not kept."""

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
    """A check has failed: trials of this structure are not fused again; the first record stays.

    Attributes:
        plan: The plan of the trials.
        key: Names the structure in every process.
        reason: What differed, and by how much.
        study: The study whose run has found it.
    """

    plan: int
    key: str
    reason: str
    study: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAdded:
    """A state is kept; a later one of the same node and epoch takes its place."""

    plan: int
    ref: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved:
    """A state is no longer kept."""

    plan: int
    node: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A worker was busy with a stage."""

    plan: int
    node: int
    start: int
    stop: int
    worker: str
    state: str
    started_at: float
    seconds: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnqueued:
    """The user wants a configuration to be tried next; ``place`` counts from 0."""

    study: int
    place: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAsked:
    """A trial was asked to reach ``target``; ``config`` is given when it is new."""

    study: int
    trial: int
    target: int
    config: Mapping[str, Any] | None
    group: Any
    parent: tuple[int, int] | None
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStopped:
    """A trial was given up."""

    study: int
    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReported:
    """A trial reached its target with this value of the study's metric.

    ``objectives`` has all metrics of a study with several; ``violation`` is by how much it breaks the
    study's constraints (None: there are none).
    """

    study: int
    trial: int
    epoch: int
    value: float
    objectives: Mapping[str, float] | None = None
    violation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailed:
    """A trial will not reach its target."""

    study: int
    trial: int
    epoch: int
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMoved:
    """A study is "running", "stopped" or "done"."""

    study: int
    state: str


Record = (
    StudyMoved
    | NodeRecord
    | EpochRecord
    | EpochAgain
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

    ``family`` is equal for plans that train the same and differ only in their metrics (None for a
    plan of an older version).
    """

    id: int
    identity: str
    task: str
    created_at: float
    family: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecords:
    """All that is known of a plan, or all that is new of it; nodes in the order they were made.

    ``revision`` is the plan's when it was read: nothing up to it is missing.
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
    """What others have done to a plan since a driver looked last, and all that they are training now."""

    news: PlanRecords
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInfo:
    """A study; ``spec`` says what it was made from, ``state`` is "running", "stopped" or "done"."""

    id: int
    name: str
    plan: int
    spec: Mapping[str, Any]
    state: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as it stands; ``error`` is kind, message and traceback.

    ``objectives`` and ``violation`` are those of ``TrialReported``.
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

    @property
    def feasible(self) -> bool:
        """Whether it keeps within the study's constraints."""
        return not self.violation


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorRecord:
    """A trial of an earlier study that another one may learn from; ``metrics`` after epochs 1, 2, ..."""

    config: Mapping[str, Any]
    state: str
    target: int
    metrics: Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One entry of a study's log: ``kind`` is "enqueued", "asked", "stopped", "reported" or "failed".

    ``config`` is what was enqueued; ``trial`` is then its place in the queue.
    """

    kind: str
    trial: int
    epoch: int
    value: float | None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecords:
    """All trials of a study, and what happened to them in order."""

    trials: list[TrialRecord]
    log: list[LogRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """A study at a glance; ``num_trials`` counts by state, ``num_done`` those that went all the way.

    ``state`` is "interrupted" where a study was running and its process is gone.
    """

    name: str
    state: str
    metric: str
    num_trials: Mapping[str, int]
    num_done: int
    best_value: float | None
    best_trial: int | None
    trial_epochs: int
    plan_epochs: int
    seconds: float
    last_activity: float | None
