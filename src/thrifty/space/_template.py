"""Drawing from nested templates: a domain may hold schedules whose fields are domains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from thrifty.core import SpaceError

from ._domain import Choice, Domain
from .schedules import Schedule


_PLAIN = frozenset({int, float, str, bool, type(None)})
Draw = Callable[[Domain], Any]
Levels = Callable[[Domain], tuple[Any, ...]]


def resolve(value: Any, draw: Draw) -> Any:
    """Replace every domain inside ``value`` by what ``draw`` picks from it."""
    if type(value) in _PLAIN:  # a shortcut: isinstance with abstract classes is slow
        return value
    if isinstance(value, Domain):
        return resolve(draw(value), draw)
    if isinstance(value, tuple):
        return tuple(resolve(item, draw) for item in value)
    if isinstance(value, Schedule) and value.is_template():
        return replace(  # type: ignore[type-var]
            value, **{name: resolve(v, draw) for name, v in _fields(value)}
        )
    return value


def expand(value: Any, levels: Levels) -> Iterator[Any]:
    """Yield every value that ``value`` can become, each domain giving what ``levels`` returns."""
    if isinstance(value, Domain):
        for option in levels(value):
            yield from expand(option, levels)
    elif isinstance(value, tuple):
        yield from itertools.product(*(list(expand(item, levels)) for item in value))
    elif isinstance(value, Schedule) and value.is_template():
        names = [name for name, _ in _fields(value)]
        for picks in itertools.product(*(list(expand(v, levels)) for _, v in _fields(value))):
            yield replace(value, **dict(zip(names, picks, strict=True)))  # type: ignore[type-var]
    else:
        yield value


def size(value: Any, num_levels: Callable[[Domain], float]) -> float:
    """Return how many values ``value`` can become; ``num_levels`` counts each plain domain."""
    if isinstance(value, Choice):
        return sum(size(option, num_levels) for option in value.options)
    if isinstance(value, Domain):
        return num_levels(value)
    total = 1.0
    if isinstance(value, tuple):
        for item in value:
            total *= size(item, num_levels)
    elif isinstance(value, Schedule):
        for _, item in _fields(value):
            total *= size(item, num_levels)
    return total


def holds_schedule(value: Any) -> bool:
    """Return whether ``value`` is a schedule or may become one."""
    if isinstance(value, Choice):
        return any(holds_schedule(option) for option in value.options)
    return isinstance(value, Schedule)


def check_no_schedule_within(name: str, value: Any) -> None:
    """Reject a list that contains a schedule, or a domain that has such a list.

    The nested schedule would never be evaluated.

    Raises:
        SpaceError: The value contains such a list.
    """
    if isinstance(value, Choice):
        for option in value.options:
            check_no_schedule_within(name, option)
    elif isinstance(value, tuple):
        for item in value:
            if holds_schedule(item):
                raise SpaceError(
                    f"{name}={value!r}: a list cannot hold a schedule; make the schedule a "
                    f"hyper-parameter of "
                    'its own and name it where the list is used, such as betas=("beta1", '
                    "0.999) in an optimizer"
                )
            check_no_schedule_within(name, item)


def _fields(schedule: Schedule) -> list[tuple[str, Any]]:
    return [(f.name, getattr(schedule, f.name)) for f in fields(schedule)]  # type: ignore[arg-type]
