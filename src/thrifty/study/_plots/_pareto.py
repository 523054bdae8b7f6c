"""Plot of two or more objectives against each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.core import UsageError
from thrifty.study._comparable import objective_values
from thrifty.study._names import escaped
from thrifty.study._results import TrialResult

from ._axes import limits, tidy


Point = tuple[float, float]


def pareto_front(
    trials: Sequence[TrialResult],
    *,
    metrics: Sequence[str],
    modes: Sequence[str],
    front: Collection[int],
) -> Figure:
    """Plot every trial that has reported and not failed, one panel per pair of objectives.

    Trials whose numbers are in ``front`` are emphasised. Trials that were not trained to the end
    are fainter.

    Raises:
        UsageError: There is only one objective.
    """
    if len(metrics) < 2:
        raise UsageError(
            f"a study of one objective ({metrics[0]}) has no Pareto front; give several: "
            'metric=["accuracy", "size"], mode=["max", "min"]'
        )
    found = [
        (trial, values)
        for trial in trials
        if trial.state != "failed" and (values := objective_values(trial, metrics)) is not None
    ]
    pairs = list(combinations(range(len(metrics)), 2))
    columns = min(3, len(pairs))
    rows = -(-len(pairs) // columns)
    size = (6.4, 4.6) if len(pairs) == 1 else (4.2 * columns, 3.8 * rows)
    figure = Figure(figsize=size, layout="constrained")
    for panel, (first, second) in enumerate(pairs):
        axes: Axes = figure.add_subplot(rows, columns, panel + 1)
        groups: dict[str, list[Point]] = {}
        for trial, values in found:
            point = (values[first], values[second])
            groups.setdefault(_group(trial, front), []).append(point)
        _draw(axes, groups)
        if len(pairs) == 1:
            _join(axes, groups.get("Pareto front", []), mode=modes[first])
        ends = [limits([v[i] for _, v in found], mode=modes[i]) for i in (first, second)]
        if any(num_outside for _, _, num_outside in ends):
            _zoom(axes, ends)
        axes.set_xlabel(_label(metrics[first], modes[first]))
        axes.set_ylabel(_label(metrics[second], modes[second]))
        tidy(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, frameon=False, loc="outside upper left", ncols=3, fontsize=9
        )
    return figure


def _group(trial: TrialResult, front: Collection[int]) -> str:
    if trial.number in front:
        return "Pareto front"
    if trial.violation:
        return "breaks a constraint"
    return "trained to the end" if trial.state == "done" else "stopped earlier"


def _draw(axes: Axes, groups: Mapping[str, Sequence[Point]]) -> None:
    styles: dict[str, dict[str, Any]] = {
        "breaks a constraint": {"color": "tab:red", "markersize": 4, "markerfacecolor": "none"},
        "stopped earlier": {"color": "0.75", "markersize": 4},
        "trained to the end": {"color": "0.5", "markersize": 5},
        "Pareto front": {"color": "C0", "markersize": 7},
    }
    for group, style in styles.items():
        if group in groups:
            axes.plot(*zip(*groups[group], strict=True), "o", label=group, **style)


def _join(axes: Axes, front: Sequence[Point], *, mode: str) -> None:
    """Draw the border of the front; ``mode`` is that of the horizontal objective."""
    if len(front) > 1:
        style = "steps-post" if mode == "min" else "steps-pre"
        axes.plot(*zip(*sorted(front), strict=True), color="C0", linewidth=1, drawstyle=style)


def _zoom(axes: Axes, ends: Sequence[tuple[float, float, int]]) -> None:
    """Show only the area within the limits of both objectives."""
    for which, (low, high, _) in zip(("x", "y"), ends, strict=True):
        room = 0.05 * (high - low) or 1.0
        axes.set(**{f"{which}lim": (low - room, high + room)})
    axes.set_title("far worse ones are outside of the picture", fontsize=9, loc="left")


def _label(metric: str, mode: str) -> str:
    return f"{escaped(metric)} ({'higher' if mode == 'max' else 'lower'} is better)"
