"""How the stored descriptions of two studies differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thrifty.core import UsageError

from ._epoch_times import stored_unit
from ._records import StudyInfo


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
