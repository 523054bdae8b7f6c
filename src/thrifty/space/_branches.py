"""Where trials of one space may diverge: the epochs whose states are worth keeping."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _template
from ._pieces import Segment
from ._variants import (
    MAX_VARIANTS,
    count,
    ends,
    every_value,
    is_continuous,
    templates_of,
    with_intervals,
)
from .schedules import Schedule


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
        [schedule.segments(max_epochs) for schedule in _template.expand(kept, ends)]
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
