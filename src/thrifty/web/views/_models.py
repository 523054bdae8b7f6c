"""Response models of the API, from which the schema at ``/openapi.json`` is generated."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


Number = float | None
"""A finite number; null if it is missing, infinite or NaN."""


class Response(BaseModel):
    """Base class of all responses."""

    model_config = ConfigDict(frozen=True)


class ErrorResponse(Response):
    """Reason of an error response."""

    detail: str


class Revision(Response):
    """A revision, which changes whenever something is written."""

    revision: str


class Saving(Response):
    """Epochs that trials reached, epochs that were trained for them, and the difference."""

    reached: int
    trained: int
    saved: int
    factor: Number = Field(description="reached / trained")


class Unit(Response):
    """The unit in which a study counts what it trains."""

    name: str = Field(description="steps, tokens or epochs")
    per_epoch: int = Field(description="how much of it an epoch has")


EPOCHS = Unit(name="epochs", per_epoch=1)


class StudyCard(Response):
    """Summary of a study."""

    id: int
    name: str
    state: str
    task: str
    metrics: list[str]
    modes: list[str]
    created_at: float
    last_activity: Number
    trials: dict[str, int] = Field(description="by state: done, running, paused, stopped, failed")
    stopped_in_training: int = Field(
        description="trials that were in training when the study stopped; the next run goes on "
        "with them"
    )
    num_trials: int
    epochs: Saving
    unit: Unit
    seconds: float
    best_value: Number
    best_trial: int | None


class StudyList(Response):
    """All studies, oldest first."""

    studies: list[StudyCard]


class Parameter(Response):
    """A hyper-parameter and its domain."""

    name: str
    domain: str = Field(description="as recorded")
    kind: str = Field(description="real number, whole number, choice, schedule or fixed")
    options: list[str] = Field(description="a range, or the options of a choice, in words")
    when: str = Field(description="the condition under which it exists; empty: always")


class StudyDetail(Response):
    """One study: its definition and its current status."""

    study: StudyCard
    algorithm: str
    seed: int | None
    max_epochs: int | None
    resume: str = Field(
        description="the command that goes on; empty if a process runs the study, if it is done, "
        "or if no file that defines it is recorded"
    )
    constraints: list[str]
    space: list[Parameter]
    best_config: dict[str, str] = Field(description="of the best trial, as one would write it")
    best_epochs: int | None = Field(
        description="epoch that the best trial has reached, at which trials are compared"
    )
    num_seeds: int = Field(description="of each trial; values are means over them")
    best_interval: list[Number] | None = Field(
        description="95 % confidence interval of the best mean; none for one seed"
    )


class History(Response):
    """Values of trials by number, and the best so far; subsampled if there are many."""

    metric: str
    mode: str
    trials: list[int]
    values: list[Number]
    best_trials: list[int] = Field(description="those that improved on all before them")
    best_values: list[Number]
    shown: int
    total: int


class Curve(Response):
    """A metric of one trial over its epochs."""

    trial: int
    state: str
    best: bool = Field(description="shown because it is among the best")
    value: Number
    points: list[tuple[int, Number]]


class Curves(Response):
    """Learning curves of the best trials and some others."""

    metric: str
    mode: str
    names: list[str] = Field(description="names of all metrics")
    every: int = Field(description="step between the epochs shown")
    unit: Unit
    curves: list[Curve]
    total: int


class Axis(Response):
    """One coordinate of the configurations."""

    name: str
    kind: Literal["number", "category"]
    log: bool
    labels: list[str] = Field(description="of a category, by number")
    ticks: list[float] = Field(description="all values of a number that has only a few")


class Parallel(Response):
    """Trials as lines through axes. A row holds the values by axis, then the metric."""

    metric: str
    mode: str
    axes: list[Axis]
    trials: list[int]
    rows: list[list[Number]]
    total: int


class Pareto(Response):
    """Trials by their objectives, in a row each, and those that no other one dominates."""

    metrics: list[str]
    modes: list[str]
    trials: list[int]
    rows: list[list[Number]]
    front: list[int] = Field(description="numbers of trials")
    total: int = Field(description="trials that have reported and keep the constraints")


class Share(Response):
    """Share of a coordinate in the variance that coordinates explain, each alone."""

    name: str
    share: float


class Importance(Response):
    """Importance of the hyper-parameters, at an epoch that enough trials have passed.

    The shares sum to one.
    """

    metric: str
    epoch: int
    unit: Unit
    trials: int
    shares: list[Share]
    one_value: list[str] = Field(
        description="hyper-parameters of which all these trials have the same value"
    )
    note: str


class ForestStage(Response):
    """Epochs ``start + 1 .. stop`` that were trained once, drawn on rows ``top .. bottom``."""

    id: int
    parent: int | None
    node: int
    start: int
    stop: int
    trials: int
    saved: int
    some: list[int] = Field(description="a few of the trials")
    best: Number
    state: Literal["done", "running", "pending", "failed"]
    top: float
    bottom: float


class HiddenStages(Response):
    """Stages that are left out beside or after a stage."""

    parent: int | None
    stages: int
    trials: int
    start: int
    stop: int
    top: float
    bottom: float


class Forest(Response):
    """The stage forest of a study, reduced to the stages with the most trials."""

    metric: str
    mode: str
    stages: list[ForestStage]
    more: list[HiddenStages]
    rows: float
    epochs: int
    unit: Unit
    total: int
    saved: int


class WorkerStage(Response):
    """A stage on a worker. Stages at the same time form a pack, and each has a lane."""

    id: int
    node: int
    start: int
    stop: int
    state: str
    error: str
    began: float
    seconds: float
    lane: int
    pack: int


class WorkerRow(Response):
    """The stages of one worker."""

    name: str
    lanes: int
    total: int
    largest: int = Field(description="how many stages its largest pack has")
    busy: float = Field(description="seconds with at least one stage")
    device: str | None = Field(description="its device; null if it was not recorded")
    peak_bytes: int | None = Field(
        description="peak memory of its process: on a GPU what PyTorch has allocated there, else "
        "resident memory; null if it was not measured"
    )
    stages: list[WorkerStage]


class Workers(Response):
    """Stages of the study's plan on workers over time; only the longest if there are many."""

    began: Number
    ended: Number
    workers: list[WorkerRow]
    shown: int
    counted: int = Field(description="the longest, over which packs and busy seconds are made")
    total: int


class TrialRow(Response):
    """A trial in the table."""

    number: int
    state: str
    value: Number
    values: dict[str, Number]
    reached: int
    target: int
    horizon: int | None = Field(description="the epoch at which its training ends")
    violation: Number
    config: dict[str, str]


class Trials(Response):
    """A page of the table."""

    names: list[str]
    metrics: list[str]
    trials: list[TrialRow]
    total: int


class Line(Response):
    """One hyper-parameter over the epochs."""

    name: str
    text: str = Field(description="as one would write it")
    kind: Literal["number", "text"]
    moves: bool
    epochs: list[float]
    values: list[float | str | None]


class TrialStage(Response):
    """A stage of the trial's path, and some trials that share it."""

    node: int
    start: int
    stop: int
    trials: int
    others: list[int]


class ArtifactFile(Response):
    """A file that a trial has logged."""

    name: str
    digest: str = Field(description="of its content, and a part of the address of its download")
    num_bytes: int
    error: str = Field(description="why it is not stored; empty if it is")


class TrialLine(Response):
    """A line that user code has logged while the trial trained."""

    epoch: int
    at: float = Field(description="in seconds since 1970 (UTC)")
    level: str
    logger: str
    text: str


class Trial(Response):
    """One trial: its schedule, its curves, and the trials that share its training."""

    number: int
    state: str
    value: Number
    values: dict[str, Number]
    reached: int
    target: int
    horizon: int | None = Field(description="the epoch at which its training ends")
    violation: Number
    error: str
    traceback: str
    parent: list[int] | None
    schedule: list[Line]
    config: dict[str, Any] = Field(description="its hyper-parameters, as a database keeps them")
    curves: dict[str, list[tuple[int, Number]]]
    stages: list[TrialStage]
    shared_epochs: int
    seed_values: list[Number] = Field(description="the value of each seed; none for one seed")
    sd: Number = Field(description="standard deviation over the seeds")
    interval: list[Number] | None = Field(description="95 % confidence interval of the mean")
    user_attrs: dict[str, str] = Field(description="user attributes, as text")
    artifacts: list[ArtifactFile]
    seconds: Number = Field(
        description="its share of the time of training, shared epochs included; null for none"
    )
    log_lines: list[TrialLine] = Field(description="the last lines that its code has logged")


class Act(Response):
    """A request to a study."""

    kind: str
    trial: int | None
    text: str
    who: str
    at: float
    queued: bool = Field(description="whether it waits for a process that runs the study")
    answer: str = Field(description="the reason if it could not be done, else empty")

    @classmethod
    def of(cls, act: Any) -> Self:
        """Return the response of an act of the store."""
        names = ("kind", "trial", "text", "who", "at", "answer")
        return cls(queued=act.is_queued, **{name: getattr(act, name) for name in names})


class Acts(Response):
    """The requests to a study."""

    acts: list[Act]
    can_act: bool = Field(description="whether readers of this dashboard may ask something")


class Branch(Response):
    """A trial that is another one until some epoch, and what training it costs."""

    config: dict[str, str] = Field(description="its hyper-parameters, as text")
    known_epochs: int = Field(description="how many of its first epochs are trained already")
    kept_epoch: int = Field(description="the last of these whose state is kept; 0 if none is")
    epochs_again: int = Field(description="known epochs that are trained again")
    epochs_to_train: int = Field(description="all epochs that are trained for it, of all seeds")


class Code(Response):
    """A code with which a page may ask something of one study, once."""

    code: str


class Deleted(Response):
    """A deleted study that can be restored."""

    id: int = Field(description="its number among the deleted studies")
    name: str
    num_trials: int
    who: str = Field(description="the user and the machine that deleted it")
    at: float

    @classmethod
    def of(cls, study: Any) -> Self:
        """Return the response of a deleted study of the store."""
        names = ("id", "name", "num_trials", "who", "at")
        return cls(**{name: getattr(study, name) for name in names})


class DeletedStudies(Response):
    """The deleted studies that can be restored, the oldest first."""

    studies: list[Deleted]
    can_act: bool = Field(description="whether readers of this dashboard may restore them")


class Restored(Response):
    """A study that is there again."""

    name: str


def finite(value: Any) -> Number:
    """Return a number that JSON can represent, or None.

    >>> finite(1), finite(float("inf")), finite(None), finite("?")
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = float(value)
    return number if number - number == 0.0 else None
