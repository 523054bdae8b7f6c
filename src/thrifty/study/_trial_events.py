"""What a study decides and learns, in order, as frozen values: what loggers and displays watch.

A run of a study tells its observers ``StudyBegan``, then of each trial ``TrialBegan``, any number of ``TrialAdvanced`` and
``TrialEnded``, those of several trials in between each other, and ``StudyEnded``. Epochs count states: epoch ``e`` is the
state after ``e`` epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyBegan:
    """A run of a study has begun.

    Attributes:
        study: its name.
        key: the same in all runs of this study, and in those of no other one, even one of the same name.
        metrics: what it optimises; trials are compared by the first.
        modes: ``"max"`` or ``"min"`` for each metric.
        resumed: there was a run of it before.
    """

    study: str
    key: str
    metrics: tuple[str, ...]
    modes: tuple[str, ...]
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBegan:
    """A trial has its configuration and will be trained.

    A resumed run says so again of each trial that may still go on, before it says anything else of it.

    Attributes:
        trial: its number.
        config: its hyper-parameters; schedules are schedules.
        parent: the trial it branched off, and at which epoch.
        epoch: where it stands; 0 for a new one.
    """

    trial: int
    config: Mapping[str, Any]
    parent: tuple[int, int] | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAdvanced:
    """A trial has reached the epoch that it was asked to reach.

    Within a run each epoch of a trial comes once. A run that goes on after a crash may begin with some that were told
    before, because what was not yet written down is trained again.

    Attributes:
        trial: its number.
        first_epoch: the first epoch since its last report.
        metrics: all metrics after epochs ``first_epoch``, ``first_epoch + 1``, ... up to where it stands.
        value: the study's first metric there.
        best: no feasible trial before was as good.
        shared_epochs: how many of these epochs an earlier trial had reached already, so that they cost nothing.

    >>> event = TrialAdvanced(trial=0, first_epoch=3, metrics=({"mse": 0.5}, {"mse": 0.4}), value=0.4)
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
        """Where the trial stands."""
        return self.first_epoch + len(self.metrics) - 1

    def epochs(self) -> enumerate[Mapping[str, float]]:
        """Pairs of an epoch and its metrics."""
        return enumerate(self.metrics, start=self.first_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial will not be trained any more.

    Attributes:
        trial: its number.
        state: ``"done"`` (it went all the way), ``"stopped"`` (given up for better ones) or ``"failed"``.
        message: why it failed.
    """

    trial: int
    state: Literal["done", "stopped", "failed"]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyEnded:
    """A run of a study has ended. Trials without a ``TrialEnded`` wait where they stand.

    Attributes:
        state: ``"done"`` (there is nothing more to try), ``"stopped"`` (it can go on) or ``"failed"`` (an error ended the run).
        best_trial: the feasible trial with the best value where its training stands, if there is one.
        best_value: that value of the study's first metric.
    """

    state: Literal["done", "stopped", "failed"]
    best_trial: int | None = None
    best_value: float | None = None


TrialEvent = StudyBegan | TrialBegan | TrialAdvanced | TrialEnded | StudyEnded
