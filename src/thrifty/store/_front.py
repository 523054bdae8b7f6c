"""The best trials: the best one for a single objective, or the Pareto front for several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._records import StudyInfo, TrialRecord


def nondominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the ascending indices of the points that no other point dominates.

    Higher is better in each coordinate. A point dominates another if it is worse in no coordinate
    and better in at least one, so equal points do not dominate each other.

    >>> nondominated([(1, 3), (2, 2), (1, 2), (3, 1), (2, 2)])
    [0, 1, 3, 4]
    """
    if not len(points):
        return []
    table = np.asarray(points, float)
    # Sort in descending order, so that only earlier points can dominate a point.
    order = np.lexsort(table.T[::-1])[::-1]
    front = _scan(table[order]) if table.shape[1] <= 2 else _sweep(table[order])
    return sorted(int(order[index]) for index in front)


def _scan(ranked: np.ndarray) -> list[int]:
    """Return the Pareto front of sorted points with one or two objectives.

    A point is on it if it improves the last objective, or equals the last point that did.
    """
    out: list[int] = []
    for index, point in enumerate(ranked):
        if not out or point[-1] > ranked[out[-1]][-1] or (point == ranked[out[-1]]).all():
            out.append(index)
    return out


def _sweep(ranked: np.ndarray) -> list[int]:
    """Return the Pareto front of sorted points: compare each point with the front so far."""
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
    """Return the best recorded trial of a study, or its Pareto front if it has several objectives.

    Trials are compared by their metric at the epoch that each has reached. A trial counts if it has
    reported, has not failed and keeps the constraints, whether or not its training goes on. The
    result is empty if there is none. If trials tie in a single objective, the first is the best.
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
