"""What the log says about failed trials: each error once when it occurs, and all at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thrifty.core import StageFailed, plain_logger
from thrifty.plan import Answer
from thrifty.store import FailureGroup, failure_groups
from thrifty.store._failures import error_key, failure_lines, listed_trials


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
    hint = (
        f"\nstudy.trials[{first.trials[0]}].error has the traceback" if first.traceback else ""
    )
    return "\n".join(failure_lines(groups)) + hint
