"""Documents about what is trained: plans, results, costs, branches, requests, answers of tools."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on only

from ._database_documents import Document, ErrorMessage, FailureDocument, StudyStatus, TrialDocument


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
    unreported_epochs: int
    """Epochs that the study has trained and that no trial has reported."""
    retrained_epochs: int
    """Epochs that were trained again because a state was not kept."""
    packed_epochs: int
    """Epochs that were trained in a pack."""
    seconds: float
    """Seconds of training of the epochs that the trials have reached, by whichever study."""
    seconds_trained: float
    """Seconds of training by the study's own runs, as ``thrifty status`` shows them."""
    seconds_checks: float
    """The seconds of them that checks took."""
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
    num_unfinished: int
    """How many trials have not ended yet and go on with the next run."""
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
    """Studies that have trained its epochs; a repeated configuration has the earlier ones."""


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
    one_value: list[str]
    """Hyper-parameters of which all compared trials have the same value."""


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
