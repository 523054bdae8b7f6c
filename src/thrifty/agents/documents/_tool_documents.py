"""Documents that only the tools for coding agents answer with."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on only

from ._base_document import Document, ErrorMessage
from ._database_documents import StudyStatus
from ._training_documents import TriedDocument


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
