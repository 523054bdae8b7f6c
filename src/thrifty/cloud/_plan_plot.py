"""Plot of a plan: cost against time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from thrifty.core import CloudError, require

from ._offer import Fleet, Interval
from .planning._planner import FleetPlan


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_APART = 20.0
"""Pixels between two points whose numbers can both be read."""

_HEIGHT, _ROW = 4.6, 0.19
"""Inches: height of the figure without the list of names, and of each row of that list."""

_WIDE = 20.0
"""Ratio of largest to smallest value above which an axis gets a logarithmic scale."""


def plot_front(
    plan: FleetPlan, *, deadline_s: float | None = None, budget_usd: float | None = None
) -> Figure:
    """Plot the Pareto front of cost against time, with intervals (matplotlib).

    Fleets have numbers, and the names are listed below. Where points lie close together, some have
    neither.

    Args:
        plan: Plan to plot; its best fleet is marked.
        deadline_s: Deadline to draw as a line.
        budget_usd: Budget to draw as a line.

    Raises:
        CloudError: The plan has no fleets.
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib.figure", extra="plots")
    if not plan.front:
        raise CloudError("the plan has no fleets to draw")
    library = import_module("thrifty.core._figure")
    figure: Figure = library.NotebookFigure(figsize=(7.2, _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    others = [fleet for fleet in plan.front if fleet != plan.best]
    axes.plot(
        [_point(fleet)[0] for fleet in plan.front],
        [_point(fleet)[1] for fleet in plan.front],
        color="C0",
        linewidth=1,
        drawstyle="steps-post",
    )
    _points(axes, others, colour="C0", size=5, label="no other is both cheaper and faster")
    if plan.best is not None:
        _points(axes, [plan.best], colour="C3", size=9, label="chosen")
    if deadline_s is not None:
        axes.axvline(deadline_s / 3600, color="black", linestyle="--", label="deadline")
    if budget_usd is not None:
        axes.axhline(budget_usd, color="black", linestyle="--", label="budget")
    shown = [*others, plan.best] if plan.best is not None else others
    _scale(axes, "x", [fleet.time_s for fleet in shown])
    _scale(axes, "y", [fleet.cost_usd for fleet in shown])
    axes.set(xlabel="hours, from renting to the end", ylabel="dollars")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=9)
    _number(figure, axes, others, chosen=plan.best)
    return figure


def _points(axes: Axes, fleets: Sequence[Fleet], *, colour: str, size: float, label: str) -> None:
    if not fleets:
        return
    axes.errorbar(
        [_point(fleet)[0] for fleet in fleets],
        [_point(fleet)[1] for fleet in fleets],
        xerr=_arms([fleet.time_s for fleet in fleets], 3600),
        yerr=_arms([fleet.cost_usd for fleet in fleets], 1),
        fmt="o",
        color=colour,
        markersize=size,
        elinewidth=0.8,
        alpha=0.85,
        label=label,
    )


def _arms(intervals: Sequence[Interval], unit: float) -> list[list[float]]:
    """Return the lengths of the error bars below and above the medians."""
    return [
        [(each.median - each.low) / unit for each in intervals],
        [(each.high - each.median) / unit for each in intervals],
    ]


def _number(figure: Figure, axes: Axes, fleets: Sequence[Fleet], *, chosen: Fleet | None) -> None:
    """Number the points that lie apart, in the order of time, and list the fleets' names."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 (an extra)

    figure.draw_without_rendering()  # gives the axes their place, and so the points theirs
    taken: list[Fleet] = [] if chosen is None else [chosen]
    places = [axes.transData.transform(_point(fleet)) for fleet in taken]
    for fleet in fleets:
        here = axes.transData.transform(_point(fleet))
        if all(math.dist(here, place) >= _APART for place in places):
            taken.append(fleet)
            places.append(here)
    names, colours = [], []
    for number, fleet in enumerate(sorted(taken, key=lambda fleet: _point(fleet)), start=1):
        colour = "C3" if fleet == chosen else "0.3"
        axes.annotate(
            f"{number}",
            _point(fleet),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=9,
            color=colour,
        )
        names.append(f"{number}:  {fleet}")
        colours.append(colour)
    figure.set_figheight(_HEIGHT + _ROW * -(-len(names) // 2))  # so that the axes stay as large
    figure.legend(
        [Line2D([], [], linestyle="") for _ in names],
        names,
        labelcolor=colours,
        frameon=False,
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        handlelength=0,
        handletextpad=0,
    )


def _point(fleet: Fleet) -> tuple[float, float]:
    """Return where a fleet is drawn: hours and dollars."""
    return fleet.time_s.median / 3600, fleet.cost_usd.median


def _scale(axes: Axes, which: str, intervals: Sequence[Interval]) -> None:
    """Set a logarithmic scale if the range is wide; use plain numbers in either case."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 (an extra)

    axis = axes.xaxis if which == "x" else axes.yaxis
    low = min(each.low for each in intervals)
    high = max(each.high for each in intervals)
    if low > 0 and high > _WIDE * low:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
