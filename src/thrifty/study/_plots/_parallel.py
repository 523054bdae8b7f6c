"""Plot of all hyper-parameters of all trials, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from thrifty.space import Choice, Coordinate, Space
from thrifty.study._comparable import Comparable, comparable, is_log
from thrifty.study._names import escaped, shorten
from thrifty.study._results import TrialResult

from ._axes import (
    at_epoch,
    chosen,
    colour_bar,
    colours_of,
    limits,
    number_ticks,
    option_ticks,
    spread,
)


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
    figure = Figure(figsize=(2.2 + 1.4 * len(shown), 4.8), layout="constrained")
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
            -0.08,
            sum(_ABSENT) / 2,
            "not there",
            ha="right",
            va="center",
            fontsize=8,
            color="0.4",
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
        ticks = [
            ((p + 0.5) / len(domain.options), n) for p, n in zip(places, names, strict=True)
        ]
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
