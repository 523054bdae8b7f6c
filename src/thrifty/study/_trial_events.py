"""What a run tells of its trials: events for loggers, and failures for the log.

The events tell what a study decides and learns. A run sends its observers ``StudyBegan`` first and
``StudyEnded`` last. In between it sends, for each trial, ``TrialBegan``, any number of
``TrialAdvanced``, and ``TrialEnded``. The events of several trials interleave. Epochs count states:
epoch ``e`` is the state after ``e`` epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thrifty.core import StageFailed, plain_logger
from thrifty.plan import Answer
from thrifty.store import FailureGroup, failure_groups
from thrifty.store._reports import error_key, failure_lines, listed_trials


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
        signal: The number of the signal that stopped the run, such as 2 after Ctrl-C.
    """

    state: Literal["done", "stopped", "failed"]
    best_trial: int | None = None
    best_value: float | None = None
    signal: int | None = None


TrialEvent = StudyBegan | TrialBegan | TrialAdvanced | TrialEnded | StudyEnded


logger = plain_logger(__name__)

Errors = Mapping[int, tuple[str, str, str]]
"""Kind, message and traceback of failed trials, by number."""


class FailureLog:
    """The failures that this process has logged."""

    def __init__(self) -> None:
        self._said: dict[str, list[int]] = {}
        """The trials that the log has named for each error, by the error's key."""
        self._diverged: list[int] = []
        """Trials that failed by their metrics since the log last named such trials."""
        self.withdrawn: set[int] = set()
        """Nodes of failed trials with several seeds: their other replicas may fail, too."""

    def note_diverged(self, trial: int) -> None:
        """Note a trial with a metric that is not finite, for ``say_diverged``."""
        self._diverged.append(trial)

    def forget_diverged(self) -> None:
        """Drop the noted trials: an earlier run has logged them."""
        self._diverged.clear()

    def say_stage(self, event: StageFailed, answers: Sequence[Answer]) -> None:
        """Log which trials failed with a stage.

        No trial fails if the stage is tried again, or if no trial requests it any more.
        """
        failed = [answer.trial for answer in answers if answer.failure is not None]
        numbers = sorted(number for number in failed if isinstance(number, int))
        if not numbers:
            if event.node not in self.withdrawn:
                logger.warning("training failed, but no trial for that: %s", event.message)
            return
        where = f" (traceback: study.trials[{numbers[0]}].error)" if event.traceback else ""
        self._say_once(numbers, event.message, where=where)

    def say_diverged(self, errors: Errors) -> None:
        """Log which trials failed because a metric is not finite."""
        if not self._diverged:
            return
        failed, self._diverged = self._diverged, []
        messages: dict[str, list[int]] = {}
        for number in sorted(failed):
            messages.setdefault(errors[number][1], []).append(number)
        for message, numbers in messages.items():
            self._say_once(numbers, message)

    def say_all(self, errors: Errors, *, before: frozenset[int]) -> None:
        """Log the errors of a run with all their trials, except those that were logged so already.

        Args:
            errors: The failures at the end of the run.
            before: The trials that failed in earlier runs.
        """
        news = [
            group
            for group in failure_groups(errors)
            if not before.issuperset(group.trials)
            and self._said.get(error_key(group.message)) != list(group.trials)
        ]
        if news:
            logger.warning("%s", failure_text(news))

    def _say_once(self, numbers: list[int], message: str, *, where: str = "") -> None:
        """Log the first trials with an error; the end of the run counts the others."""
        key = error_key(message)
        if key not in self._said:
            self._said[key] = numbers
            logger.warning("%s failed: %s%s", listed_trials(numbers), message, where)


def failure_text(groups: Sequence[FailureGroup]) -> str:
    """Return a line for each error, and one that says where the traceback of the first is."""
    first = groups[0]
    hint = f"\nstudy.trials[{first.trials[0]}].error has the traceback" if first.traceback else ""
    return "\n".join(failure_lines(groups)) + hint
