"""Templates, schedules whose fields are domains: drawing from them, and their variants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
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


MAX_VARIANTS = 4096
"""Most variants of one template that are enumerated."""


def templates_of(value: Any) -> Iterator[Schedule]:
    """Yield the schedules that a hyper-parameter may be, each as a template.

    >>> from thrifty.space import Int, Step
    >>> list(templates_of(Choice([0.1, Choice([Step(0.1, [Int(2, 4)]), Step(0.1, [5])])])))
    [Step(0.1, (Int(low=2, high=4, log=False, step=1, conditions=()),)), Step(0.1, (5,))]
    """
    if isinstance(value, Choice):
        for option in value.options:
            yield from templates_of(option)
    elif isinstance(value, Schedule):
        yield value


def variants(template: Schedule) -> Iterator[Schedule]:
    """Yield schedules that a template can become, including its longest one.

    If there are few variants, all are given (for an interval, the two ends). If there are many,
    only those with each number at one of its ends are given, because lengths and limits of
    schedules are monotone in their fields. If even these are too many, only the longest is given.

    Raises:
        ScheduleError: A variant is not well formed.
    """
    for levels in (every_value, ends):
        if count(template, levels) <= MAX_VARIANTS:
            yield from expand(template, levels)
            return
    yield longest(template)


def every_value(domain: Domain) -> tuple[Any, ...]:
    """Return all values of a countable domain, or the two ends of an interval."""
    if math.isinf(domain.size()):
        return domain.levels(2)
    return domain.levels(min(int(domain.size()), MAX_VARIANTS + 1))


def ends(domain: Domain) -> tuple[Any, ...]:
    """Return the least and the greatest number of a domain; a choice adds its other options."""
    if not isinstance(domain, Choice):
        return domain.levels(2)
    numbers = [option for option in domain.options if _is_number(option)]
    others = [option for option in domain.options if not _is_number(option)]
    extremes = dict.fromkeys([min(numbers), max(numbers)]) if numbers else ()
    return (*extremes, *others)


def count(value: Any, levels: Levels) -> int:
    """Return how many values ``value`` can become, each domain giving what ``levels`` returns."""
    if isinstance(value, Domain):
        return sum(count(option, levels) for option in levels(value))
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else ()
    if isinstance(value, Schedule) and value.is_template():
        parts = tuple(getattr(value, f.name) for f in fields(value))  # type: ignore[arg-type]
    return math.prod(count(part, levels) for part in parts)


def longest(template: Schedule) -> Schedule:
    """Return the variant that needs the most epochs, found one field at a time.

    Raises:
        ScheduleError: The variant is not well formed.

    >>> from thrifty.space import Float, Int, Step
    >>> longest(Step(Float(0.1, 0.3), [Int(2, 90), Choice([95, 99])]))
    Step(0.3, (90, 99))
    """
    candidates = {
        f.name: _longest_values(getattr(template, f.name))
        for f in fields(template)  # type: ignore[arg-type]
    }
    best = replace(  # type: ignore[type-var]
        template, **{name: values[0] for name, values in candidates.items()}
    )
    for name, values in candidates.items():
        others = [replace(best, **{name: value}) for value in values]  # type: ignore[type-var]
        best = max(others, key=Schedule.span)
    return best


def _longest_values(value: Any) -> list[Any]:
    """Return a field's candidates for the longest variant: greatest number and non-numbers."""
    if isinstance(value, Schedule):
        return [longest(value) if value.is_template() else value]
    if isinstance(value, tuple):
        return [tuple(_longest_values(item)[0] for item in value)]
    if not isinstance(value, Domain):
        return [value]
    top = [max(numbers)] if (numbers := [v for v in ends(value) if _is_number(v)]) else []
    others = [o for v in ends(value) if not _is_number(v) for o in _longest_values(v)]
    return top + others


def with_intervals(value: Any, levels: Levels) -> Iterator[Any]:
    """Yield a template for each choice of its countable values; its intervals stay in place."""
    if isinstance(value, Domain):
        if not isinstance(value, Choice) and math.isinf(value.size()):
            yield value
            return
        for option in levels(value):
            yield from with_intervals(option, levels)
    elif isinstance(value, tuple):
        yield from product(*(list(with_intervals(item, levels)) for item in value))
    elif isinstance(value, Schedule) and value.is_template():
        names = [f.name for f in fields(value)]  # type: ignore[arg-type]
        parts = [list(with_intervals(getattr(value, name), levels)) for name in names]
        for picks in product(*parts):
            yield replace(value, **dict(zip(names, picks, strict=True)))  # type: ignore[type-var]
    else:
        yield value


def is_continuous(value: Any, *, epochs: float) -> bool:
    """Return whether two draws of a hyper-parameter almost never agree.

    For a schedule, this means that they differ already in the first of ``epochs`` epochs.

    >>> from thrifty.space import Float, Step
    >>> templates = Step(Float(0.1, 0.2), [3]), Step(0.1, [Float(2, 3)])
    >>> tuple(is_continuous(template, epochs=9) for template in templates)
    (True, False)
    """
    if isinstance(value, Choice):
        return all(is_continuous(option, epochs=epochs) for option in value.options)
    if isinstance(value, Domain):
        return math.isinf(value.size())
    if isinstance(value, tuple):
        return any(is_continuous(item, epochs=epochs) for item in value)
    if not isinstance(value, Schedule) or count(value, ends) > MAX_VARIANTS:
        return False
    return all(
        len({s.segments(epochs)[0].piece for s in expand(kept, ends)}) > 1
        for kept in with_intervals(value, ends)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
