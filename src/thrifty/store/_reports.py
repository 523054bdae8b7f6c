"""What stored rows tell: states of trials, failures by their error, how studies differ, frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thrifty.core import UsageError, plain_text, require

from ._epoch_times import stored_unit
from ._records import StudyInfo


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


def shown_state(
    state: str, *, reached: int, horizon: int | None, study_state: str = "running"
) -> str:
    """Return the state of a trial as in ``Study.trials``: a waiting trial is done or paused.

    A trial that was in training when its study stopped is paused, too: no process trains it.

    Args:
        state: Its state in the database.
        reached: The epoch that it has reached.
        horizon: The epoch at which its training ends; None if that is not known.
        study_state: The state of the study.

    >>> shown_state("waiting", reached=4, horizon=4), shown_state("waiting", reached=2, horizon=4)
    ('done', 'paused')
    >>> shown_state("running", reached=2, horizon=4, study_state="stopped")
    'paused'
    """
    if state == "running" and num_stopped_in_training({state: 1}, study_state=study_state):
        return "paused"
    if state != "waiting":
        return state
    return "done" if horizon is not None and reached >= horizon else "paused"


def trials_by_state(
    num_trials: Mapping[str, int], *, num_done: int, study_state: str
) -> dict[str, int]:
    """Return how many trials of a study are in each state of ``Study.trials``.

    Trials that were in training when the study stopped are left out, because no process trains
    them; ``num_stopped_in_training`` counts them.

    Args:
        num_trials: Trials by their state in the database.
        num_done: How many of the waiting ones are done; the others are paused.
        study_state: The state of the study.

    >>> trials_by_state({"waiting": 3}, num_done=2, study_state="done")
    {'done': 2, 'paused': 1}
    """
    counts = {**num_trials, "done": num_done}
    counts["paused"] = counts.pop("waiting", 0) - num_done
    counts["running"] = counts.get("running", 0) - num_stopped_in_training(
        num_trials, study_state=study_state
    )
    return {state: count for state, count in sorted(counts.items()) if count}


def num_stopped_in_training(num_trials: Mapping[str, int], *, study_state: str) -> int:
    """Return how many trials were in training when their study stopped.

    >>> num_stopped_in_training({"running": 2}, study_state="stopped")
    2
    """
    return 0 if study_state in ("running", "paused") else num_trials.get("running", 0)


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
            trials=tuple(numbers), message=errors[numbers[0]][1], traceback=errors[numbers[0]][2]
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
        others = "another error" if len(rest) == 1 else f"{len(rest):,} other errors"
        more = trials_text(num_trials).replace(" ", " more ")
        lines.append(f"{more} failed with {others}")
    return lines


def error_key(message: str) -> str:
    """Return a text that is the same for messages that differ only in numbers."""
    return _NUMBER.sub("#", message)


def trials_text(num_trials: int) -> str:
    """Return a number of trials as text.

    >>> trials_text(1), trials_text(1_200)
    ('1 trial', '1,200 trials')
    """
    return f"{num_trials:,} trial{'' if num_trials == 1 else 's'}"


def no_such_trial(name: str, trial: object, *, num_trials: int) -> str:
    """Return the error that a study lacks a trial, which is named by its number.

    >>> no_such_trial("digits", 9, num_trials=8)
    "study 'digits' has no trial 9; it has 8, counted from 0"
    >>> no_such_trial("digits", 0, num_trials=0)
    "study 'digits' has no trials yet; run it first"
    """
    shown = repr(plain_text(name))
    if not num_trials:
        return f"study {shown} has no trials yet; run it first"
    return f"study {shown} has no trial {trial!r}; it has {num_trials:,}, counted from 0"


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


FrameBackend = Literal["pandas", "polars"]

_EXTRAS = {"pandas": "dataframe", "polars": "polars"}


def frame(rows: Sequence[Mapping[str, Any]], *, backend: FrameBackend = "pandas") -> Any:
    """Return a data frame of rows that all have the same keys.

    In polars each column has one type, so a column of mixed types or of schedules becomes text.
    pandas stores the objects themselves.

    Raises:
        MissingExtraError: The library is not installed.
        UsageError: ``backend`` is not a supported library.
    """
    if backend not in _EXTRAS:
        raise UsageError(f"backend is {backend!r}; it is one of 'pandas', 'polars'")
    library = require(backend, extra=_EXTRAS[backend])
    return library.DataFrame([dict(r) for r in rows] if backend == "pandas" else columns(rows))


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of rows, each of one type (number, bool or text); None if missing.

    >>> columns([{"lr": 1, "net": "small"}, {"lr": 0.5, "net": None}, {"lr": None, "net": 3}])
    {'lr': [1.0, 0.5, None], 'net': ['small', None, '3']}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _of_one_type([row.get(name) for row in rows]) for name in names}


def _of_one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return values
    if kinds == {int, float}:
        return _each(float, values)
    return _each(str, values)


def _each(kind: type, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else kind(value) for value in values]


# -- how two studies differ ------------------------------------------------------------


def is_legacy(spec: Mapping[str, Any]) -> bool:
    """Return whether a study was made by a version that identified its task by source code only."""
    return "training" not in spec.get("task", {})


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return descriptions of the differences between two sets of components, most telling first.

    >>> changes({"function f": "#1", "attribute x": "1"}, {"function f": "#2", "attribute x": "2"})
    ['attribute x was 1 and is 2', 'function f changed']
    """
    values: list[str] = []
    contents: list[str] = []
    others: list[str] = []
    for name in dict.fromkeys((*now, *was)):
        before, after = was.get(name), now.get(name)
        if before is None:
            others.append(f"{name} is new")
        elif after is None:
            others.append(f"{name} is gone")
        elif before != after and (before.startswith("#") or after.startswith("#")):
            contents.append(f"{name} changed")
        elif before != after:
            text = f"{name} was {before} and is {after}"
            values.insert(0 if name == "task" else len(values), text)
    return [*values, *contents, *others]


def listed(texts: list[str], *, most: int = 6) -> str:
    """Return the first texts as a comma-separated list, with the number of the others.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"


def likeness(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    """Return the similarity of two specs' tasks, from 0 to 1.

    A component of the same name counts half if its content differs.
    """
    first, second = _components(one), _components(two)
    named = first.keys() & second.keys()
    same = sum(first[name] == second[name] for name in named)
    return (same + len(named)) / max(2 * len(first.keys() | second.keys()), 1)


def _components(spec: Mapping[str, Any]) -> dict[str, str]:
    task = spec.get("task", {})
    return dict(task) if is_legacy(spec) else {**task["training"], **task["evaluation"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two studies share.

    Attributes:
        names: Names of the studies.
        shares: ``"everything"``, ``"training"`` (states, but no metrics) or ``"nothing"``.
        why: The same in words.
        differences: What differs between them.
    """

    names: tuple[str, str]
    shares: Literal["everything", "training", "nothing"]
    why: str
    differences: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines of text."""
        yield f"{self.why}{':' if self.differences else ''}"
        for each in self.differences:
            yield f"  {each}"


def compare(one: StudyInfo, two: StudyInfo, *, num_common: int = 0) -> Comparison:
    """Return what two studies share, and if they do not share everything, why.

    Args:
        one: A study.
        two: Another one.
        num_common: How many epochs trials of both have reached, if they have one search plan.
    """
    names = (one.name, two.name)
    both = f"studies {one.name!r} and {two.name!r}"
    if one.plan == two.plan:
        unit = stored_unit(one.spec)
        num = unit.text(num_common) if num_common else f"no {unit.name}"
        why = (
            f"{both} have one search plan: what their trials have in common is trained once; "
            f"so far they have {num} in common"
        )
        return Comparison(names=names, shares="everything", why=why)
    old = [info.name for info in (one, two) if is_legacy(info.spec)]
    if len(old) == 1:
        why = (
            f"{both} share nothing: {old[0]!r} was made by an older version of thrifty, which "
            "knew its task by other means"
        )
        return Comparison(names=names, shares="nothing", why=why)
    (training, metrics), (other_training, other_metrics) = map(_parts, (one.spec, two.spec))
    reasons = [*_setting(one.spec, two.spec), *_differences(training, other_training, names)]
    evaluated = _differences(metrics, other_metrics, names)
    all_of_them = (*reasons, *evaluated)
    if reasons:
        return Comparison(
            names=names, shares="nothing", why=f"{both} share nothing", differences=all_of_them
        )
    if evaluated:
        why = f"{both} train the same; kept states are evaluated again, for their metrics differ"
        return Comparison(names=names, shares="training", why=why, differences=all_of_them)
    why = f"{both} are equal, but thrifty has changed between them: they share nothing"
    return Comparison(names=names, shares="nothing", why=why)


def most_alike(one: StudyInfo, others: Sequence[StudyInfo]) -> StudyInfo:
    """Return the study whose task is most similar.

    Raises:
        UsageError: There are no others.
    """
    if not others:
        raise UsageError(f"the database has no other study than {one.name!r} to compare it with")
    return max(others, key=lambda info: (likeness(one.spec, info.spec), info.id))


def _parts(spec: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return what a task trains and how it evaluates, by name.

    An older version stored both as one.
    """
    task = spec.get("task", {})
    return (task, {}) if is_legacy(spec) else (task["training"], task["evaluation"])


def _setting(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    if one.get("seed") != two.get("seed"):
        yield f"seed: {one.get('seed')} and {two.get('seed')}"


def _differences(
    one: Mapping[str, str], two: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    out = []
    for name in dict.fromkeys((*one, *two)):
        mine, theirs = one.get(name), two.get(name)
        if mine is None or theirs is None:
            out.append(f"{name}: only in {names[theirs is not None]!r}")
        elif mine != theirs and (mine.startswith("#") or theirs.startswith("#")):
            out.append(f"{name}: differs")
        elif mine != theirs:
            out.append(f"{name}: {mine} and {theirs}")
    return sorted(out)
