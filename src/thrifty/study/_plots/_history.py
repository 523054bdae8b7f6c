"""Plot of the best value so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.study._names import escaped
from thrifty.study._results import TrialResult

from ._axes import limits, tidy


def history(
    trials: Sequence[TrialResult],
    *,
    metric: str,
    mode: str,
    unique_epochs: Sequence[int] | None = None,
) -> Figure:
    """Plot each trial's latest value, and the best feasible value so far.

    ``unique_epochs`` gives, for each trial, the epochs trained for it and those before it, shared
    ones counted once; without it, the axis counts trials. Failed trials are left out, and far worse
    values appear only as a number.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    shown = [t for t in trials if t.value is not None and t.state != "failed"]
    places = {
        t.number: unique_epochs[t.number] if unique_epochs else t.number + 1 for t in shown
    }
    for feasible, colour, label in (
        (True, "0.6", "trials"),
        (False, "tab:red", "breaks a constraint"),
    ):
        group = [t for t in shown if bool(t.violation) != feasible]
        if group:
            axes.plot(
                [places[t.number] for t in group],
                [t.value for t in group if t.value is not None],
                ".",
                color=colour,
                alpha=0.6,
                markersize=5,
                label=label,
            )
    _draw_best(axes, [t for t in shown if not t.violation], places, mode=mode)
    low, high, num_outside = limits([t.value for t in shown if t.value is not None], mode=mode)
    if num_outside:
        room = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)
        axes.set_title(f"{num_outside} outside of the picture", fontsize=9, loc="left")
    if shown:
        axes.legend(facecolor="white", edgecolor="none", framealpha=0.8)
    axes.set_xlabel("epochs trained, shared ones once" if unique_epochs else "trials")
    axes.set_ylabel(escaped(metric))
    tidy(axes)
    return figure


def _draw_best(
    axes: Axes, trials: Sequence[TrialResult], places: Mapping[int, int], *, mode: str
) -> None:
    values = [trial.value for trial in trials if trial.value is not None]
    if not values:
        return
    best = (np.maximum if mode == "max" else np.minimum).accumulate(values)
    across = [places[trial.number] for trial in trials]
    axes.plot(
        across, best, color="C0", linewidth=2, drawstyle="steps-post", label="best so far"
    )
    found = values.index(best[-1])
    label = f"trial {trials[found].number}: {values[found]:.4g}"
    axes.plot(across[found], values[found], "o", color="C0", markersize=7, label=label)
