"""Pictures of hyper-parameters and what they do to the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from thrifty.core import UsageError
from thrifty.core._figure import NotebookFigure
from thrifty.space import Choice, Coordinate, Space
from thrifty.study._identity import Comparable, comparable, is_log
from thrifty.study._preflight import escaped, shorten
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
    number_ticks,
    option_ticks,
    spread,
    tidy,
)


def importance(shares: Mapping[str, float], *, metric: str, basis: str = "") -> Figure:
    """Plot a bar for each share, the largest on top; ``basis`` says what they come from."""
    ranked = sorted(shares.items(), key=lambda item: item[1])
    figure = NotebookFigure(figsize=(7, 1.2 + 0.32 * len(ranked)), layout="constrained")
    axes: Axes = figure.add_subplot()
    names = [escaped(shorten(name, limit=40)) for name, _ in ranked]
    bars = axes.barh(range(len(ranked)), [share for _, share in ranked], color="C0", height=0.7)
    axes.set_yticks(range(len(ranked)), names)
    axes.bar_label(bars, [f"{share:.1%}" for _, share in ranked], padding=4, fontsize=9)
    axes.set_xlim(0, 1.12 * max(shares.values(), default=1.0) or 1.0)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel(f"share in what makes trials differ in {escaped(metric)}")
    axes.set_title(escaped(basis), fontsize=9, loc="left")
    axes.tick_params(axis="y", length=0)
    tidy(axes)
    return figure


_MAX_AXES = 12
_ABSENT = (-0.22, -0.1)
"""Band for the lines of trials that lack a coordinate, the best trial on top."""


def parallel_coordinates(
    trials: Sequence[TrialResult],
    space: Space,
    *,
    metric: str,
    mode: str,
    names: Sequence[str] | None = None,
) -> Figure:
    """Plot a line for each comparable trial through an axis for each coordinate.

    The axes are the first 12 coordinates, or those in ``names``. A line's colour is the metric at
    an epoch that trials have in common (see ``comparable``); better trials are drawn over worse
    ones. If a trial lacks a coordinate, its line passes below that axis.

    Raises:
        UsageError: No trial has reported yet, or a name is unknown.
    """
    seen = comparable(trials, space)
    shown = chosen(seen, names)[:_MAX_AXES]
    figure = NotebookFigure(figsize=(2.2 + 1.4 * len(shown), 4.8), layout="constrained")
    axes: Axes = figure.add_subplot()
    colours = colours_of(seen.values, mode=mode)
    sign = 1.0 if mode == "max" else -1.0
    order = sorted(range(len(seen)), key=lambda index: sign * seen.values[index])
    heights = [_heights(seen, coordinate, mode=mode) for coordinate in shown]
    lines = [[(x, column[index]) for x, column in enumerate(heights)] for index in order]
    axes.add_collection(
        LineCollection(
            lines,
            colors=colours.to_rgba(np.array([seen.values[index] for index in order])),
            linewidths=[2.2 if index == order[-1] else 0.9 for index in order],
            alpha=0.75,
        )
    )
    for x, coordinate in enumerate(shown):
        _draw_axis(axes, x, coordinate)
    if any(height < 0 for column in heights for height in column):
        axes.text(
            -0.08, sum(_ABSENT) / 2, "not there", ha="right", va="center", fontsize=8, color="0.4"
        )
    axes.set_xlim(-0.35, max(len(shown) - 0.35, 0.35))
    axes.set_ylim(_ABSENT[0] - 0.03, 1.04)
    axes.set_yticks([])
    labels = [escaped(shorten(c.name, limit=20)) for c in shown]
    axes.set_xticks(range(len(shown)), labels, rotation=20, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0)
    axes.spines[:].set_visible(False)
    _, _, num_outside = limits(seen.values, mode=mode)
    colour_bar(
        figure, axes, colours, label=at_epoch(metric, seen), num_outside=num_outside, mode=mode
    )
    return figure


def _heights(seen: Comparable, coordinate: Coordinate, *, mode: str) -> list[float]:
    """Return the height of each trial on a coordinate's axis."""
    heights = [0.0] * len(seen)
    sign = 1.0 if mode == "max" else -1.0
    for rank, index in enumerate(sorted(range(len(seen)), key=lambda i: sign * seen.values[i])):
        heights[index] = _ABSENT[0] + (_ABSENT[1] - _ABSENT[0]) * (rank + 0.5) / len(seen)
    domain = coordinate.domain
    for index, place in spread(seen, coordinate, mode=mode, width=0.3).items():
        if isinstance(domain, Choice):
            heights[index] = (place + 0.5) / len(domain.options)
        else:
            heights[index] = _fraction(coordinate, place)
    return heights


def _fraction(coordinate: Coordinate, value: float) -> float:
    domain = coordinate.domain
    assert not isinstance(domain, Choice)
    if is_log(coordinate):
        return math.log(value / domain.low) / math.log(domain.high / domain.low)
    return (value - domain.low) / (domain.high - domain.low)


def _draw_axis(axes: Axes, x: int, coordinate: Coordinate) -> None:
    """Draw an axis with ticks and names by hand, because each axis has its own scale."""
    axes.plot([x, x], [0, 1], color="0.2", linewidth=1, zorder=3)
    domain = coordinate.domain
    if isinstance(domain, Choice):
        places, names = option_ticks(domain, limit=14)
        ticks = [((p + 0.5) / len(domain.options), n) for p, n in zip(places, names, strict=True)]
    else:
        ticks = number_ticks(coordinate, num=5)
    for height, label in ticks:
        axes.plot([x - 0.03, x], [height, height], color="0.2", linewidth=1, zorder=3)
        axes.text(
            x + 0.04,
            height,
            label,
            va="center",
            fontsize=8,
            zorder=4,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
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
    figure = NotebookFigure(figsize=(7.2, 5), layout="constrained")
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
    seen: Comparable, x: Coordinate, y: Coordinate, *, both: Sequence[int], low: float, high: float
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


_MAX_COLUMNS = 4
_MAX_PANELS = 16


def slice_plot(
    trials: Sequence[TrialResult],
    space: Space,
    *,
    metric: str,
    mode: str,
    names: Sequence[str] | None = None,
) -> Figure:
    """Plot a panel for each coordinate (or for those in ``names``).

    A panel has one point for each comparable trial that has the coordinate. Values are those at an
    epoch that trials have in common (see ``comparable``); values far worse than most lie outside.

    Raises:
        UsageError: No trial has reported yet, or a name is unknown.
    """
    seen = comparable(trials, space)
    shown = chosen(seen, names)[:_MAX_PANELS]
    columns = min(_MAX_COLUMNS, max(len(shown), 1))
    rows = -(-len(shown) // columns)
    figure = NotebookFigure(figsize=(1.2 + 2.9 * columns, 0.6 + 2.9 * rows), layout="constrained")
    low, high, num_outside = limits(seen.values, mode=mode)
    room = 0.05 * (high - low) or 1.0
    best = best_of(seen, range(len(seen)), mode=mode)
    first: Axes | None = None
    for panel, coordinate in enumerate(shown):
        axes: Axes = figure.add_subplot(rows, columns, panel + 1, sharey=first)
        first = first or axes
        places = spread(seen, coordinate, mode=mode, width=0.6)
        is_choice = isinstance(coordinate.domain, Choice)
        axes.plot(
            list(places.values()),
            [seen.values[index] for index in places],
            ".",
            color="C0",
            alpha=0.5,
            markersize=7,
        )
        if best in places:
            axes.plot(places[best], seen.values[best], "*", color="tab:red", markersize=11)
        lay_axis(axes, "x", coordinate)
        if is_choice:
            axes.tick_params(axis="x", length=0)
        if panel % columns == 0:
            axes.set_ylabel(escaped(at_epoch(metric, seen)))
        else:
            axes.tick_params(axis="y", labelleft=False)
        tidy(axes)
    if first is not None:
        first.set_ylim(low - room, high + room)
    outside = f"; {num_outside} outside of the picture" if num_outside else ""
    figure.suptitle(
        f"{len(seen)} trials{outside}; the star is the best", fontsize=9, x=0.01, ha="left"
    )
    return figure
