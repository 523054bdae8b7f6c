"""Plot of the metric over two hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.core import UsageError
from thrifty.space import Choice, Coordinate, Space
from thrifty.study._comparable import Comparable, comparable
from thrifty.study._results import TrialResult

from ._axes import (
    FloatArray,
    at_epoch,
    best_of,
    chosen,
    colour_bar,
    colours_of,
    grid_of,
    lay_axis,
    limits,
    spread,
    tidy,
)


_NUM_GRID = 60
_MIN_TRIALS = 4


def contour(
    trials: Sequence[TrialResult],
    space: Space,
    *,
    metric: str,
    mode: str,
    names: Sequence[str] | None = None,
) -> Figure:
    """Plot the metric over two coordinates.

    They are the first two of the named coordinates (default: of all) that differ between the trials
    that have both of them. Two numbers are shown as a landscape, the mean of nearby trials, white
    where there are none; options are shown as points. Values are those at an epoch that trials have
    in common (see ``comparable``).

    Raises:
        UsageError: No trial has reported yet, a name is unknown, or no two of the coordinates can
            be shown together.
    """
    seen = comparable(trials, space)
    x, y = _pair(seen, chosen(seen, names))
    both = [i for i, p in enumerate(seen.picked) if x.name in p and y.name in p]
    values = [seen.values[index] for index in both]
    colours = colours_of(values, mode=mode)
    low, high, num_outside = limits(values, mode=mode)
    figure = Figure(figsize=(7.2, 5), layout="constrained")
    axes: Axes = figure.add_subplot()
    if not isinstance(x.domain, Choice) and not isinstance(y.domain, Choice):
        landscape = _landscape(seen, x, y, both=both, low=low, high=high)
        levels = np.linspace(low, high, 13) if high > low else [low - 1, low + 1]
        axes.contourf(
            grid_of(x, _NUM_GRID),
            grid_of(y, _NUM_GRID),
            landscape,
            levels=levels,
            cmap=colours.cmap,
            norm=colours.norm,
            alpha=0.85,
        )
    across, up = (spread(seen, c, mode=mode, width=0.7) for c in (x, y))
    axes.scatter(
        [across[index] for index in both],
        [up[index] for index in both],
        c=colours.to_rgba(np.array(values)),
        s=26,
        edgecolors="white",
        linewidths=0.6,
        zorder=3,
    )
    best = best_of(seen, both, mode=mode)
    axes.plot(across[best], up[best], "*", color="tab:red", markersize=13, zorder=4)
    lay_axis(axes, "x", x, limit=24)
    lay_axis(axes, "y", y, limit=24)
    tidy(axes)
    axes.set_title(f"{len(both)} trials; the star is the best", fontsize=9, loc="left")
    label = at_epoch(metric, seen)
    colour_bar(figure, axes, colours, label=label, num_outside=num_outside, mode=mode)
    return figure


def _pair(seen: Comparable, coordinates: Sequence[Coordinate]) -> tuple[Coordinate, Coordinate]:
    for x, y in combinations(coordinates, 2):
        both = [p for p in seen.picked if x.name in p and y.name in p]
        differ = all(len({p[c.name] for p in both}) > 1 for c in (x, y))
        if len(both) >= _MIN_TRIALS and differ:
            return x, y
    tried = ", ".join(c.name for c in coordinates)
    raise UsageError(
        f"no two of ({tried}) differ between at least {_MIN_TRIALS} trials that have both; "
        "name two others, or run more of the study first"
    )


def _landscape(
    seen: Comparable,
    x: Coordinate,
    y: Coordinate,
    *,
    both: Sequence[int],
    low: float,
    high: float,
) -> FloatArray:
    """Return the mean of the trials near each grid point, shape ``[y, x]``; NaN far from all."""
    points_N2 = np.array([[c.to_unit(seen.picked[i][c.name]) for c in (x, y)] for i in both])
    values_N = np.clip([seen.values[index] for index in both], low, high)
    width = 0.28 * len(both) ** (-1 / 4)
    line = np.linspace(0, 1, _NUM_GRID)
    near_x, near_y = (
        np.exp(-0.5 * ((line[:, None] - points_N2[:, axis]) / width) ** 2) for axis in (0, 1)
    )
    weights_YXN = near_y[:, None, :] * near_x[None, :, :]
    total = weights_YXN.sum(axis=-1)
    far = total < np.exp(-2.0)  # two widths from the nearest trial
    mean: FloatArray = np.where(far, np.nan, weights_YXN @ values_N / np.maximum(total, 1e-300))
    return mean
