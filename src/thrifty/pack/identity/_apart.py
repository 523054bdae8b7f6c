"""A search for the members of a task that only its evaluation reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

from ._own import is_own, members_of
from ._place import slots_of, vars_of
from ._reach import Reach
from ._syntax import mentions


def only_evaluated(
    task: Any,
    *,
    whole: Reach,
    evaluation: Collection[str],
    contract: Collection[str],
    reach_without: Callable[[Collection[str]], Reach],
) -> frozenset[str]:
    """Return the members that evaluation code names, but training code never does.

    The result is empty if evaluation assigns to the task, the model or a global, because then it
    is a part of training.

    Args:
        task: The task.
        whole: What the whole task reaches.
        evaluation: The members that only evaluation calls from outside.
        contract: All members that are called from outside.
        reach_without: Returns what the task reaches without some members.
    """
    members = _members(task)
    apart = frozenset(evaluation) & members
    rest = reach_without(apart)
    while apart & rest.mentioned:
        apart -= rest.mentioned
        rest = reach_without(apart)
    if not apart:
        return apart
    if not rest.mentioned & _COMPUTED:
        others = members - frozenset(contract)
        apart, rest = _grown(
            apart, rest, others=others, whole=whole, reach_without=reach_without
        )
    return frozenset() if _assigns(task, whole, rest) else apart


def _grown(
    apart: frozenset[str],
    rest: Reach,
    *,
    others: frozenset[str],
    whole: Reach,
    reach_without: Callable[[Collection[str]], Reach],
) -> tuple[frozenset[str], Reach]:
    """Add the helpers and settings that only these members name."""
    while True:
        named: set[str] = set()
        for function in _evaluating(whole, rest):
            named |= mentions(function.__code__).attributes
        more = (named & others) - apart - rest.mentioned
        if not more:
            return apart, rest
        apart |= more
        rest = reach_without(apart)


def _assigns(task: Any, whole: Reach, rest: Reach) -> bool:
    """Return whether evaluation changes what may outlive it.

    A class that only evaluation uses may change its own objects.
    """
    training = {id(each.value) for each in rest.classes}
    helpers = {
        id(member)
        for kind in whole.classes
        if id(kind.value) not in training and not isinstance(task, kind.value)
        for _, member in members_of(kind.value)
    }
    return any(
        mentions(function.__code__).assigns
        for function in _evaluating(whole, rest)
        if id(function) not in helpers
    )


def _evaluating(whole: Reach, rest: Reach) -> list[FunctionType]:
    training = {id(each.value) for each in rest.functions}
    return [each.value for each in whole.functions if id(each.value) not in training]


def _members(task: Any) -> frozenset[str]:
    names = {*map(str, vars_of(task)), *slots_of(type(task))}
    for base in type(task).__mro__:
        if is_own(base):
            names |= {name for name, _ in members_of(base)}
    return frozenset(n for n in names if not (n.startswith("__") and n.endswith("__")))


_COMPUTED = frozenset({
    "getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "locals", "globals", "dir",
    "attrgetter", "methodcaller", "asdict", "astuple", "getmembers",
})  # fmt: skip
"""Names by which training code may read members that it does not name."""
