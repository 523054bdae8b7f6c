"""Share of the metric's variance that each coordinate explains alone, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ._columns import Column


_NUM_BINS = 8
Values = npt.NDArray[np.float64]


def shares(
    columns: Sequence[Column], values: Sequence[float], *, mode: str
) -> dict[str, float]:
    """Return the share of each coordinate in the variance of the metric, the largest first.

    This is a one-way analysis of variance. Numbers are cut into bins of equally many trials, each
    category is a group, and trials without the coordinate form their own group. The shares are
    epsilon squared (Kelley, 1935), which subtracts what groups of random numbers would explain, so
    they need not add up to one. Values that are far worse than most are clipped to the worst of the
    others. ``Study.importance`` (fANOVA) is more thorough and takes longer.

    >>> grid = [(a, b) for a in range(8) for b in range(8)]
    >>> axes = [
    ...     Column(name="a", labels=(), log=False, values=tuple(float(a) for a, _ in grid)),
    ...     Column(name="b", labels=(), log=False, values=tuple(float(b) for _, b in grid)),
    ... ]
    >>> {
    ...     n: round(share, 1)
    ...     for n, share in shares(axes, [float(a) for a, _ in grid], mode="max").items()
    ... }
    {'a': 1.0, 'b': 0.0}
    """
    y = _tamed(np.asarray(values, float), mode=mode)
    total = float(((y - y.mean()) ** 2).sum()) if len(y) else 0.0
    found = {c.name: _share(_groups(c), y, total=total) for c in columns}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _share(groups: npt.NDArray[np.intp], y: Values, *, total: float) -> float:
    number, size = int(groups.max()) + 1, len(y)
    if total <= 0.0 or number < 2 or size <= number:
        return 0.0
    counts = np.bincount(groups, minlength=number)
    means = np.bincount(groups, weights=y, minlength=number) / counts
    within = float(((y - means[groups]) ** 2).sum())
    between = total - within
    by_chance = (number - 1) * within / (size - number)
    return min(max((between - by_chance) / total, 0.0), 1.0)


def _groups(column: Column) -> npt.NDArray[np.intp]:
    """Return the group of each trial, numbered from 0 without gaps."""
    x = np.array([np.nan if v is None else v for v in column.values], float)
    known = ~np.isnan(x)
    if not column.labels and len(np.unique(x[known])) > _NUM_BINS:
        edges = np.quantile(x[known], np.linspace(0, 1, _NUM_BINS + 1)[1:-1])
        x = np.where(known, np.searchsorted(edges, x, side="right"), np.nan)
    x = np.where(known, x, np.nanmax(x, initial=0.0) + 1)
    found: npt.NDArray[np.intp] = np.unique(x, return_inverse=True)[1].reshape(-1)
    return found


def _tamed(values: Values, *, mode: str) -> Values:
    """Clip values that are far worse to the worst of the others (Tukey's outer fence)."""
    if not len(values):
        return values
    sign = -1.0 if mode == "min" else 1.0
    scores = sign * values
    low, high = np.quantile(scores, [0.25, 0.75])
    if high > low:
        fence = low - 3 * (high - low)
        scores = np.maximum(scores, scores[scores >= fence].min())
    return scores
