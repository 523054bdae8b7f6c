"""The best trials: one objective's best, or what no other trial beats in all objectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._records import StudyInfo, TrialRecord


def nondominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Which of the points (higher is better in each place) no other one dominates, ascending.

    A point dominates another if it is nowhere worse and somewhere better; equal points do not dominate each other.

    >>> nondominated([(1, 3), (2, 2), (1, 2), (3, 1), (2, 2)])
    [0, 1, 3, 4]
    """
    if not len(points):
        return []
    table = np.asarray(points, float)
    # best first in each place: then a point can be dominated by those before it only
    order = np.lexsort(table.T[::-1])[::-1]
    front = _scan(table[order]) if table.shape[1] <= 2 else _sweep(table[order])
    return sorted(int(order[index]) for index in front)


def _scan(ranked: np.ndarray) -> list[int]:
    """One or two objectives: whoever improves on the last place, or equals the one who did."""
    out: list[int] = []
    for index, point in enumerate(ranked):
        if not out or point[-1] > ranked[out[-1]][-1] or (point == ranked[out[-1]]).all():
            out.append(index)
    return out


def _sweep(ranked: np.ndarray) -> list[int]:
    """Any number of objectives: each point against the front so far."""
    out: list[int] = []
    front = np.empty_like(ranked)
    for index, point in enumerate(ranked):
        above = front[: len(out)]
        beaten = (above >= point).all(axis=1) & (above > point).any(axis=1)
        if not beaten.any():
            front[len(out)] = point
            out.append(index)
    return out


def best_trials(info: StudyInfo, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The best trial of a study as it is recorded, or its Pareto front; none where no trial is feasible.

    Of trials that tie in the only objective, the first.
    """
    valued = [t for t in trials if t.state != "failed" and t.value is not None and t.feasible]
    metric, mode = info.spec.get("metric"), info.spec.get("mode")
    if not isinstance(metric, list) or not isinstance(mode, list):
        sign = -1.0 if mode == "min" else 1.0
        return sorted(valued, key=lambda t: -sign * (t.value or 0.0))[:1]
    signs = {name: -1.0 if m == "min" else 1.0 for name, m in zip(metric, mode, strict=True)}
    points = [
        [sign * (t.objectives or {})[name] for name, sign in signs.items()] for t in valued
    ]
    return [valued[index] for index in nondominated(points)]
