"""Comparison of what two studies train, from their stored specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_legacy(spec: Mapping[str, Any]) -> bool:
    """Return whether a study was made by a version that identified its task by source code only."""
    return "training" not in spec.get("task", {})


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return descriptions of the differences between two sets of components, most telling first.

    >>> changes(
    ...     {"function f": "#1", "attribute x": "1"}, {"function f": "#2", "attribute x": "2"}
    ... )
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
