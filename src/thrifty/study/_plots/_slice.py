"""Plot of the metric over each single hyper-parameter."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.space import Choice, Space
from thrifty.study._comparable import comparable
from thrifty.study._names import escaped
from thrifty.study._results import TrialResult

from ._axes import at_epoch, best_of, chosen, lay_axis, limits, spread, tidy


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
    figure = Figure(figsize=(1.2 + 2.9 * columns, 0.6 + 2.9 * rows), layout="constrained")
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
