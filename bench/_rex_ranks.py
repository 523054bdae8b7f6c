"""Ranks of schedules over settings and budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean


Cell = Mapping[str, float]
"""One setting at one budget: lower is better, infinite is a trial that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One schedule over some cells, in percent of them; ``rank`` is its mean, 1 is the best."""

    top1: float
    top3: float
    rank: float


def standing(cells: Iterable[Cell], name: str) -> Standing:
    """Return the standing of a schedule.

    Equal schedules share a place: all of them are the best, or among the best three. For the mean
    rank they get the middle of their ranks.

        >>> standing([{"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0}], "b")
        Standing(top1=100.0, top3=100.0, rank=1.5)
        >>> standing([{"a": 1.0, "b": math.inf}, {"a": 2.0, "b": 1.0}], "b").rank
        1.5
    """
    places, ranks = [], []
    for cell in cells:
        better = sum(value < cell[name] for value in cell.values())
        equal = sum(value == cell[name] for value in cell.values())
        places.append(better + 1)
        ranks.append(better + (equal + 1) / 2)
    return Standing(
        top1=100.0 * mean(place <= 1 for place in places),
        top3=100.0 * mean(place <= 3 for place in places),
        rank=mean(ranks),
    )


def worst_if_failed(value: float | None) -> float:
    """Return a metric that can be compared: infinity if it failed."""
    return math.inf if value is None or not math.isfinite(value) else value
