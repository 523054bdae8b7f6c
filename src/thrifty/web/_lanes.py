"""Lanes for the stages that a worker trained at the same time, as packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


_TOUCHING_S = 1e-3
"""Stages that overlap by less only touch, because clocks are read one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The lane in which a stage is drawn, and the size of its pack."""

    lane: int
    pack: int


def lanes(spans: Sequence[tuple[float, float]]) -> list[Lane]:
    """Return a lane for each span ``(began, ended)`` of one worker: the first that is free.

    Spans must be in order. A pack is a set of spans connected by overlaps, and its size is the
    number of lanes that it needs.

    >>> [(each.lane, each.pack) for each in lanes([(0, 2), (0, 2), (2, 3)])]
    [(0, 2), (1, 2), (0, 1)]
    """
    out: list[Lane] = []
    free_at: list[float] = []
    chosen: list[int] = []
    ends_at = float("-inf")
    for began, ended in spans:
        if began >= ends_at - _TOUCHING_S:
            _close(chosen, out)
            free_at, chosen = [], []
        lane = next(
            (i for i, free in enumerate(free_at) if began >= free - _TOUCHING_S), len(free_at)
        )
        free_at[lane : lane + 1] = [ended]
        chosen.append(lane)
        ends_at = max(ends_at, ended)
    _close(chosen, out)
    return out


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one span; spans must be sorted by beginning.

    >>> busy([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def _close(chosen: Sequence[int], out: list[Lane]) -> None:
    pack = max(chosen, default=-1) + 1
    out.extend(Lane(lane=lane, pack=pack) for lane in chosen)
