"""Plot of the metric over epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.study._results import TrialResult


def learning_curves(trials: Sequence[TrialResult], *, metric: str, mode: str) -> Figure:
    """Plot the metric of each trial over epochs, with the best trial emphasised."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    shown = [trial for trial in trials if trial.curve]
    for trial in shown:
        axes.plot(
            range(1, trial.epochs + 1), trial.curve, color="0.6", alpha=0.35, linewidth=0.9
        )
        axes.plot(trial.epochs, trial.curve[-1], ".", color="0.6", alpha=0.5, markersize=3)
    valued = [trial for trial in shown if trial.value is not None]
    if valued:
        pick = max if mode == "max" else min
        best = pick(valued, key=lambda t: t.value if t.value is not None else math.nan)
        axes.plot(
            range(1, best.epochs + 1),
            best.curve,
            color="C0",
            linewidth=2,
            label=f"trial {best.number}: {best.value:.4g}",
        )
        axes.legend(frameon=False)
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
