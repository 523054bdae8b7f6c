"""Conditions between hyper-parameters: the order of decisions, and whether conditions can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from thrifty.core import SpaceError

from ._domain import Choice, Condition, Domain, Float, Int
from .schedules import Schedule


Params = Mapping[str, Any]


def conditions_of(value: Any) -> tuple[Condition, ...]:
    """Return the conditions of a hyper-parameter."""
    return value.conditions if isinstance(value, Domain) else ()


def order_of(params: Params) -> tuple[str, ...]:
    """Return the names of all hyper-parameters, each after those that it depends on.

    Raises:
        SpaceError: A condition is ignored, names an unknown hyper-parameter or a value that the
            hyper-parameter cannot take, contradicts another condition, or depends on itself.
    """
    _check_ignored(params)
    _check_parents(params)
    order: list[str] = []
    while len(order) < len(params):
        free = [
            name
            for name, value in params.items()
            if name not in order and all(c.name in order for c in conditions_of(value))
        ]
        if not free:
            stuck = ", ".join(name for name in params if name not in order)
            raise SpaceError(f"conditions go in a circle: {stuck}; break it")
        order.extend(free)
    _check_contradictions(params, order)
    return tuple(order)


def _check_ignored(params: Params) -> None:
    """Raise SpaceError for a condition on only a part of a hyper-parameter."""
    for name, value in params.items():
        for domain in _inside(value):
            if domain.conditions:
                condition = " and ".join(_written(c) for c in domain.conditions)
                raise SpaceError(
                    f"{name!r}: the condition when({condition}) would be ignored, because its "
                    f"{type(domain).__name__} is only a part of the hyper-parameter; "
                    f"put the condition on the whole: {name}=Choice([...]).when({condition})"
                )


def _inside(value: Any) -> Iterator[Domain]:
    """Yield the domains inside a value, without the value itself."""
    if isinstance(value, Choice):
        parts: Sequence[Any] = value.options
    elif isinstance(value, Schedule):
        parts = [getattr(value, f.name) for f in fields(value)]  # type: ignore[arg-type]
    else:
        parts = value if isinstance(value, tuple) else ()
    for part in parts:
        if isinstance(part, Domain):
            yield part
        yield from _inside(part)


def _check_parents(params: Params) -> None:
    for name, value in params.items():
        for condition in conditions_of(value):
            if condition.name not in params:
                raise SpaceError(
                    f"{name!r} depends on {condition.name!r}, which is not in the space "
                    f"({', '.join(params)})"
                )
            parent = params[condition.name]
            for wanted in condition.values:
                if not may_be(parent, wanted):
                    raise SpaceError(
                        f"{name!r} depends on {condition.name}={wanted!r}, which never holds: "
                        f"{condition.name} is {parent!r}; give a value that it can take, "
                        "of the same type"
                    )


def may_be(template: Any, value: Any) -> bool:
    """Return whether a value drawn from a template may equal a given value.

    >>> (
    ...     may_be(Choice([16, Int(32, 64)]), 48),
    ...     may_be(Int(1, 4), "1"),
    ...     may_be(Float(0, 1, step=0.5), 0.3),
    ... )
    (True, False, False)
    """
    if isinstance(template, Choice):
        return any(may_be(option, value) for option in template.options)
    if isinstance(template, Float | Int):
        if not isinstance(value, int | float) or not template.low <= value <= template.high:
            return False
        if template.log or template.step is None:
            return isinstance(template, Float) or value == int(value)
        steps = (value - template.low) / template.step
        return abs(steps - round(steps)) < 1e-6
    if isinstance(template, Domain):
        return True  # a domain of another library: its values are unknown
    if isinstance(template, Schedule) and template.is_template():
        return type(value) is type(template)
    if isinstance(template, tuple) and isinstance(value, tuple):
        pairs = zip(template, value, strict=False)
        return len(template) == len(value) and all(may_be(t, v) for t, v in pairs)
    return bool(template == value)


def _check_contradictions(params: Params, order: Sequence[str]) -> None:
    """Raise SpaceError for conditions that contradict each other.

    A hyper-parameter exists only where its parents exist, so the conditions of the parents must
    hold as well.
    """
    needed: dict[str, dict[str, tuple[Any, ...]]] = {}
    for name in order:
        mine: dict[str, tuple[Any, ...]] = {}
        for condition in conditions_of(params[name]):
            wanted = {**needed[condition.name], condition.name: condition.values}
            for parent, values in wanted.items():
                both = tuple(v for v in mine.get(parent, values) if v in values)
                if not both:
                    raise SpaceError(
                        f"{name!r} is never there: its conditions want {parent} to be one of "
                        f"{list(mine[parent])} and one of {list(values)}; drop one of them"
                    )
                mine[parent] = both
        needed[name] = mine


def _written(condition: Condition) -> str:
    values = condition.values
    return (
        f"{condition.name}={values[0]!r}"
        if len(values) == 1
        else f"{condition.name}={list(values)!r}"
    )
