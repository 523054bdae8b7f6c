"""Stages that a worker trained at the same time, side by side: packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


_TOUCHING_S = 1e-3
"""Stages that overlap by less only touch: clocks are read one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where a stage is drawn, and of how many its pack is."""

    lane: int
    pack: int


def lanes(spans: Sequence[tuple[float, float]]) -> list[Lane]:
    """A lane for each span ``(began, ended)`` of one worker, the first that is free; spans are in order.

    A pack is what hangs together by overlapping; its size is how many lanes it needs.

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
    """Seconds in which at least one of the spans is; spans are in the order of their beginnings.

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
