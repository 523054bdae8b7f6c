"""Events of a study for loggers and displays, as frozen values in order.

The events tell what a study decides and learns. A run sends its observers ``StudyBegan`` first and
``StudyEnded`` last. In between it sends, for each trial, ``TrialBegan``, any number of
``TrialAdvanced``, and ``TrialEnded``. The events of several trials interleave. Epochs count states:
epoch ``e`` is the state after ``e`` epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyBegan:
    """A run of a study has begun.

    Attributes:
        study: The study's name.
        key: The same in all runs of this study, and different in any other study, even one of the
            same name.
        metrics: The metrics that the study optimises; trials are compared by the first.
        modes: ``"max"`` or ``"min"`` for each metric.
        resumed: Whether the study was run before.
    """

    study: str
    key: str
    metrics: tuple[str, ...]
    modes: tuple[str, ...]
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBegan:
    """A trial has its configuration and will be trained.

    A resumed run sends this event again for each trial that may still go on, before any other event
    of that trial.

    Attributes:
        trial: The trial's number.
        config: The trial's hyper-parameters; schedules stay schedules.
        parent: The trial it branched off, and at which epoch.
        epoch: The epoch that the trial has reached; 0 for a new one.
    """

    trial: int
    config: Mapping[str, Any]
    parent: tuple[int, int] | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAdvanced:
    """A trial has reached the epoch that the algorithm requested.

    Within a run, each epoch of a trial is reported once. A run that resumes after a crash may
    repeat epochs that were reported before, because unrecorded epochs are trained again.

    Attributes:
        trial: The trial's number.
        first_epoch: The first epoch since the trial's last report.
        metrics: All metrics after epochs ``first_epoch``, ``first_epoch + 1``, ... up to the epoch
            that the trial has reached.
        value: The study's first metric there.
        best: Whether the trial is now better than the study's best one was before.
        shared_epochs: How many of these epochs an earlier trial had reached already, so that they
            cost nothing.

    >>> event = TrialAdvanced(
    ...     trial=0, first_epoch=3, metrics=({"mse": 0.5}, {"mse": 0.4}), value=0.4
    ... )
    >>> event.epoch, dict(event.epochs())
    (4, {3: {'mse': 0.5}, 4: {'mse': 0.4}})
    """

    trial: int
    first_epoch: int
    metrics: tuple[Mapping[str, float], ...]
    value: float
    best: bool = False
    shared_epochs: int = 0

    @property
    def epoch(self) -> int:
        """The epoch that the trial has reached."""
        return self.first_epoch + len(self.metrics) - 1

    def epochs(self) -> enumerate[Mapping[str, float]]:
        """Return pairs of an epoch and its metrics."""
        return enumerate(self.metrics, start=self.first_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial will not be trained any more.

    Attributes:
        trial: The trial's number.
        state: ``"done"`` (fully trained), ``"stopped"`` (given up for better trials) or
            ``"failed"``.
        message: Why the trial failed.
    """

    trial: int
    state: Literal["done", "stopped", "failed"]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyEnded:
    """A run of a study has ended. Trials without a ``TrialEnded`` keep the epoch they have reached.

    Attributes:
        state: ``"done"`` (the algorithm has nothing more to try), ``"stopped"`` (the study can be
            resumed) or ``"failed"`` (an error ended the run).
        best_trial: The feasible trial with the best value so far, if there is one.
        best_value: That trial's value of the study's first metric.
    """

    state: Literal["done", "stopped", "failed"]
    best_trial: int | None = None
    best_value: float | None = None


TrialEvent = StudyBegan | TrialBegan | TrialAdvanced | TrialEnded | StudyEnded
