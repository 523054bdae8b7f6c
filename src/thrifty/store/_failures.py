"""Failures of trials, grouped by their error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thrifty.core import plain_text


_NUMBER = re.compile(r"(?<!\w)(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")
_NUM_LISTED = 3
"""Trials that a text lists before it counts the others."""
_NUM_GROUPS = 5
"""Errors that a text describes before it counts the others."""
_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Trials that failed with the same error.

    Messages that differ only in numbers are the same error: an address, a size, an epoch. Digits
    within names count: ``layer1`` and ``layer2`` are different.

    Attributes:
        trials: The trials' numbers, ascending.
        message: The message of the first of these trials.
        traceback: Its traceback; empty if no code raised the error, as after a timeout.
    """

    trials: tuple[int, ...]
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"{listed_trials(self.trials)} failed: {self.summary}"

    @property
    def summary(self) -> str:
        """The message in one line, the middle of a long one cut."""
        return plain_text(" ".join(self.message.split()), limit=_MESSAGE_CHARS)


def failure_groups(errors: Mapping[int, tuple[str, str, str]]) -> list[FailureGroup]:
    """Group failed trials by their error, the largest group first.

    Args:
        errors: Kind, message and traceback of each failed trial, by number.

    >>> errors = {n: ("error", f"ValueError: width {n} is odd", "") for n in (1, 3, 5, 7, 9)}
    >>> print(*failure_groups({**errors, 2: ("timeout", "the epoch hung", "")}), sep="\\n")
    trials 1, 3, 5 and 2 more failed: ValueError: width 1 is odd
    trial 2 failed: the epoch hung
    """
    members: dict[str, list[int]] = {}
    for number in sorted(errors):
        members.setdefault(error_key(errors[number][1]), []).append(number)
    groups = [
        FailureGroup(
            trials=tuple(numbers),
            message=errors[numbers[0]][1],
            traceback=errors[numbers[0]][2],
        )
        for numbers in members.values()
    ]
    return sorted(groups, key=lambda group: -len(group.trials))


def failure_lines(groups: Sequence[FailureGroup]) -> list[str]:
    """Return a line for each error; the rarest of many errors are only counted."""
    lines = [str(group) for group in groups[:_NUM_GROUPS]]
    rest = groups[_NUM_GROUPS:]
    if rest:
        num_trials = sum(len(group.trials) for group in rest)
        trials = "trial" if num_trials == 1 else "trials"
        others = "another error" if len(rest) == 1 else f"{len(rest):,} other errors"
        lines.append(f"{num_trials:,} more {trials} failed with {others}")
    return lines


def error_key(message: str) -> str:
    """Return a text that is the same for messages that differ only in numbers."""
    return _NUMBER.sub("#", message)


def listed_trials(numbers: Sequence[int]) -> str:
    """Return the numbers of some trials as text; of many, only the first.

    >>> listed_trials([4]), listed_trials(range(4)), listed_trials(range(21))
    ('trial 4', 'trials 0, 1, 2, 3', 'trials 0, 1, 2 and 18 more')
    """
    if len(numbers) == 1:
        return f"trial {numbers[0]}"
    # A list of one more is shorter than "and 1 more".
    shown = numbers if len(numbers) <= _NUM_LISTED + 1 else numbers[:_NUM_LISTED]
    more = len(numbers) - len(shown)
    return f"trials {', '.join(map(str, shown))}{f' and {more:,} more' if more else ''}"
