"""Conditions of hyper-parameters and their branches, and trials that branch off another."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from thrifty.core import ScheduleError, SpaceError, UsageError

from . import _variants
from ._domain import Choice, Condition, Domain, Float, Int, freeze, values_text
from ._pieces import Hold, Segment
from ._variants import (
    MAX_VARIANTS,
    count,
    ends,
    every_value,
    is_continuous,
    templates_of,
    with_intervals,
)
from .schedules import Branched, Schedule


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
                        f"{condition.name} is {values_text(parent)}; "
                        "give a value that it can take, of the same type"
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


Spans = list[tuple[Any, int, int]]
"""A piece, and the first and the last epoch after which it may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchInterval:
    """The epochs ``first .. last`` after which trials may diverge.

    The trials are those whose hyper-parameter ``name`` follows ``piece``.
    """

    name: str
    piece: Hashable
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The epochs and intervals of epochs after which configurations of a space may diverge."""

    epochs: tuple[int, ...] = ()
    intervals: tuple[BranchInterval, ...] = ()


def branches_of(params: Mapping[str, Any], *, max_epochs: int) -> Branches:
    """Return the epochs after which configurations of a space may diverge.

    Two timelines diverge only where a piece of one of them ends. If that time is drawn from an
    interval, it may be any epoch of the interval, but only for trials that share everything before
    it. No two trials do so if an earlier time, or another hyper-parameter, was drawn from an
    interval. If the piece that ends is known, trials that follow another piece do not diverge
    there.
    """
    epochs: set[int] = set()
    intervals: list[BranchInterval] = []
    for name, value in params.items():
        others = (other for key, other in params.items() if key != name)
        alone = any(is_continuous(other, epochs=max_epochs) for other in others)
        for template in templates_of(value):
            fixed, spans = _of_template(template, max_epochs=max_epochs)
            epochs |= fixed
            for piece, first, last in spans:
                if alone and first < last:
                    epochs |= {first, last}
                elif last > 0 and first < max_epochs:
                    one = BranchInterval(name=name, piece=piece, first=first, last=last)
                    intervals.append(one)
    return Branches(
        epochs=tuple(sorted(epoch for epoch in epochs if 0 < epoch < max_epochs)),
        intervals=tuple(dict.fromkeys(intervals)),
    )


def _of_template(template: Schedule, *, max_epochs: int) -> tuple[set[int], Spans]:
    few = count(template, every_value) <= MAX_VARIANTS
    if not few and count(template, ends) > MAX_VARIANTS:
        return set(range(1, max_epochs)), []
    groups = [
        [schedule.segments(max_epochs) for schedule in _variants.expand(kept, ends)]
        for kept in with_intervals(template, every_value if few else ends)
    ]
    epochs: set[int] = set()
    spans: Spans = []
    for group in groups:
        fixed, moving = _of_group(group)
        epochs |= fixed
        spans += moving
    if not few:
        epochs |= _between([segments for group in groups for segments in group], max_epochs)
    return epochs, spans


def _of_group(group: Sequence[Sequence[Segment]]) -> tuple[set[int], Spans]:
    """Return where variants diverge that differ only in numbers drawn from intervals."""
    if len(set(map(len, group))) > 1:
        return {math.floor(s.start) for segments in group for s in segments}, []
    epochs: set[int] = set()
    spans: Spans = []
    alike = True
    for index in range(1, len(group[0])):
        pieces = {segments[index - 1].piece for segments in group}
        starts = {segments[index].start for segments in group}
        first, last = math.floor(min(starts)), math.floor(max(starts))
        alike = alike and len(pieces) == 1
        is_whole = all(segments[index - 1].start <= first - 1 for segments in group)
        if alike and len(starts) > 1:
            spans.append((pieces.pop(), first, last))
            alike = False
        elif alike and is_whole:
            spans.append((pieces.pop(), first, first))
        else:
            epochs |= {first, last}
    return epochs, spans


def _between(variants: Sequence[Sequence[Segment]], max_epochs: int) -> set[int]:
    """Return all epochs between the first and the last at which each piece may end."""
    if len(set(map(len, variants))) > 1:
        return set(range(1, max_epochs))
    epochs: set[int] = set()
    for index in range(1, len(variants[0])):
        starts = [segments[index].start for segments in variants]
        epochs |= set(range(math.floor(min(starts)), math.floor(max(starts)) + 1))
    return epochs


def branched(
    config: Mapping[str, Any],
    *,
    epoch: int,
    horizon: int,
    scale: Mapping[str, float],
    change: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a configuration that is the given one until ``epoch``, and differs from there on.

    Args:
        config: The configuration.
        epoch: The number of epochs that both have in common.
        horizon: The length of its training.
        scale: Factors by which hyper-parameters are multiplied.
        change: New values or schedules; the time of a schedule begins at ``epoch``.

    Raises:
        UsageError: A name is unknown or given twice, nothing changes, or the epoch is none of the
            trial's.
        ScheduleError: A factor or a schedule does not fit, or a number becomes something else.
    """
    whole = isinstance(epoch, int) and not isinstance(epoch, bool)
    if not whole or not 0 < epoch < horizon:
        raise UsageError(
            f"after={epoch!r}: a trial of {horizon} epochs can branch after 1 to {horizon - 1}"
        )
    for name in (*scale, *change):
        if name not in config:
            raise UsageError(f"the trial has no {name!r}; it has: {', '.join(config)}")
    if both := sorted(scale.keys() & change.keys()):
        raise UsageError(f"{both[0]!r} is in scale and in change; give one of them")
    for name, factor in scale.items():
        if not _is_number(factor):
            raise ScheduleError(f"scale of {name!r} must be a number, got {factor!r}")
    parts: dict[str, Any] = {name: {"factor": factor} for name, factor in scale.items()}
    parts |= {name: {"after": freeze(value)} for name, value in change.items()}
    changes = {name: Branched(config[name], at=epoch, **part) for name, part in parts.items()}
    for name, schedule in changes.items():
        schedule.segments(horizon)  # does it fit?
        _check_kinds(name, schedule, epoch=epoch, horizon=horizon)
    if all(_is_same(changes[name], config[name], horizon) for name in changes):
        raise UsageError(
            "nothing changes; give scale={...} or change={...} with values that the trial does not "
            f"have after epoch {epoch}"
        )
    return {**config, **changes}


def _check_kinds(name: str, schedule: Branched, *, epoch: int, horizon: int) -> None:
    """Refuse a branch in which a number becomes a text or a list, where its trial would fail.

    Raises:
        ScheduleError: It is none.
    """
    for each in schedule.segments(horizon):
        if not isinstance(each.piece, Hold) or _is_number(each.piece.value):
            continue
        if each.start < epoch:
            return  # it was no number before
        raise ScheduleError(
            f"{name!r} is a number until epoch {epoch}, and cannot become {each.piece.value!r}; "
            "give a number or a schedule of numbers"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(schedule: Branched, before: Any, horizon: int) -> bool:
    if not isinstance(before, Schedule):
        return len(schedule.segments(horizon)) == 1
    return schedule.segments(horizon) == before.segments(horizon)
