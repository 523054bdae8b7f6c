"""Pictures of what trials have reached, and of the stages that they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.core import UsageError
from thrifty.core._figure import (
    COLOURS,
    NotebookFigure,
    count_in_whole_ticks,
    escaped,
    limits,
    tidy,
)
from thrifty.plan import ForestStage
from thrifty.space import TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.study._identity import objective_values
from thrifty.study._results import TrialResult
from thrifty.study._scaling_law import ScalingLaw


def history(
    trials: Sequence[TrialResult],
    *,
    metric: str,
    mode: str,
    unique_epochs: Sequence[int] | None = None,
    unit: TimeUnit = EPOCHS,
) -> Figure:
    """Plot each trial's latest value, and the best feasible value so far.

    ``unique_epochs`` gives, for each trial, the epochs trained for it and those before it, shared
    ones counted once; without it, the axis counts trials. Failed trials are left out, and far worse
    values appear only as a number.
    """
    figure = NotebookFigure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    shown = [t for t in trials if t.value is not None and t.state != "failed"]
    places = {
        t.number: unit.count(unique_epochs[t.number]) if unique_epochs else t.number + 1
        for t in shown
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
        axes.legend(facecolor="white", edgecolor="none", framealpha=0.8, loc=_corner(mode))
    axes.set_xlabel(f"{unit.name} trained, shared ones once" if unique_epochs else "trials")
    count_in_whole_ticks(axes)
    axes.set_ylabel(escaped(metric))
    tidy(axes)
    return figure


def _corner(mode: str) -> Literal["lower right", "upper right"]:
    """Return the corner that curves leave free; Matplotlib's own search is slow with many."""
    return "lower right" if mode == "max" else "upper right"


def _draw_best(
    axes: Axes, trials: Sequence[TrialResult], places: Mapping[int, float], *, mode: str
) -> None:
    values = [trial.value for trial in trials if trial.value is not None]
    if not values:
        return
    best = (np.maximum if mode == "max" else np.minimum).accumulate(values)
    across = [places[trial.number] for trial in trials]
    axes.plot(across, best, color="C0", linewidth=2, drawstyle="steps-post", label="best so far")
    found = values.index(best[-1])
    label = f"trial {trials[found].number}: {values[found]:.4g}"
    axes.plot(across[found], values[found], "o", color="C0", markersize=7, label=label)


def learning_curves(trials: Sequence[TrialResult], *, metric: str, mode: str) -> Figure:
    """Plot the metric of each trial over epochs, with the best trial emphasised.

    With several seeds, curves are means, and a band spans all seeds of the best trial.
    """
    figure = NotebookFigure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    shown = [trial for trial in trials if trial.curve]
    unit = trials[0].unit if trials else EPOCHS
    for trial in shown:
        axes.plot(_times(trial), trial.curve, color="0.6", alpha=0.35, linewidth=0.9)
        axes.plot(
            unit.count(trial.epochs), trial.curve[-1], ".", color="0.6", alpha=0.5, markersize=3
        )
    valued = [trial for trial in shown if trial.value is not None]
    if valued:
        pick = max if mode == "max" else min
        best = pick(valued, key=lambda t: t.value if t.value is not None else math.nan)
        axes.plot(
            _times(best),
            best.curve,
            color="C0",
            linewidth=2,
            label=f"trial {best.number}: {best.value:.4g}",
        )
        if best.num_seeds > 1:
            seeds = np.array(best.curves)
            axes.fill_between(
                _times(best),
                seeds.min(axis=0),
                seeds.max(axis=0),
                color="C0",
                alpha=0.2,
                linewidth=0,
                label=f"its {best.num_seeds} seeds",
            )
        axes.legend(frameon=False, loc=_corner(mode))
    axes.set_xlabel(unit.name[:-1])
    count_in_whole_ticks(axes)
    axes.set_ylabel(metric)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _times(trial: TrialResult) -> list[float]:
    return [trial.unit.count(epoch) for epoch in range(1, trial.epochs + 1)]


def scaling_law(law: ScalingLaw, trials: Sequence[TrialResult]) -> Figure:
    """Plot a law over horizons with its intervals, and the trials at the ends of their horizons.

    A law in two variables is one line for each size.
    """
    figure = NotebookFigure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    used = set(law.trials)
    others = [t for t in trials if t.state == "done" and t.value and t.number not in used]
    axes.plot(
        [t.unit.count(t.epochs) for t in others],
        [t.value for t in others if t.value],
        ".",
        color="0.6",
        alpha=0.5,
        markersize=4,
    )
    last = max(law.horizons)
    across = np.geomspace(min(law.horizons), 4 * last, 60)
    for index, size in enumerate(sorted(set(law.sizes)) or [None]):
        colour = f"C{index}"
        found = [law.predict(float(at), size=size) for at in across]
        places = [i for i in range(len(law.values)) if size is None or law.sizes[i] == size]
        points = [law.horizons[i] for i in places], [law.values[i] for i in places]
        label = f"law, {law.level:.0%} intervals" if size is None else f"size {size:g}"
        axes.plot(*points, "o", color=colour, markersize=5)
        axes.plot(across, [each.value for each in found], color=colour, label=label)
        for intervals, alpha in (
            ([each.interval for each in found], 0.25),
            ([each.prediction_interval for each in found], 0.12),
        ):
            low, high = zip(*intervals, strict=True)
            axes.fill_between(across, low, high, color=colour, alpha=alpha, linewidth=0)
    axes.axvline(last, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel(f"{law.unit.name} at the end of training")
    axes.set_ylabel(escaped(law.metric))
    axes.legend(frameon=False, loc="upper right")
    tidy(axes)
    return figure


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
    figure = NotebookFigure(figsize=size, layout="constrained")
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
        figure.legend(handles, labels, frameon=False, loc="outside upper left", ncols=3, fontsize=9)
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


def stage_forest(
    stages: Sequence[ForestStage], *, metric: str, saved_epochs: int, unit: TimeUnit = EPOCHS
) -> Figure:
    """Plot every stage as a bar over its epochs.

    The thickness shows the number of trials in the stage, the colour the metric at its end.
    """
    rows, num_rows = _layout(stages)
    height = min(max(2.5, 0.11 * num_rows + 1.2), 40)
    figure = NotebookFigure(figsize=(9, height), layout="constrained")
    axes: Axes = figure.add_subplot()
    values = [
        s.metrics[metric]
        for s in stages
        if s.metrics and math.isfinite(s.metrics.get(metric, math.nan))
    ]
    norm = mpl.colors.Normalize(min(values, default=0.0), max(values, default=1.0))
    colours = mpl.colormaps[COLOURS]
    for stage in stages:
        y = rows[stage.index]
        if stage.parent is not None and rows[stage.parent] != y:
            axes.plot(
                [unit.count(stage.start)] * 2,
                [rows[stage.parent], y],
                color="0.75",
                linewidth=0.8,
                zorder=1,
            )
        value = (stage.metrics or {}).get(metric, math.nan)
        colour = colours(norm(value)) if math.isfinite(value) else "0.85"
        if stage.state == "failed":
            colour = "tab:red"
        axes.plot(
            [unit.count(stage.start), unit.count(stage.stop)],
            [y, y],
            color=colour,
            linewidth=1.5 + 2.0 * math.log2(max(stage.num_trials, 1)),
            solid_capstyle="butt",
            zorder=2,
        )
    axes.set_xlabel(unit.name[:-1])
    count_in_whole_ticks(axes)
    axes.set_yticks([])
    axes.margins(x=0.01, y=0.06)
    axes.spines[["top", "right", "left"]].set_visible(False)
    trained = sum(s.stop - s.start for s in stages if s.state == "done")
    axes.set_title(
        f"{unit.count(trained):,} {unit.name} trained once, {unit.count(saved_epochs):,} not "
        "trained again; thickness: trials that share the stage",
        fontsize=9,
        loc="left",
    )
    figure.colorbar(mpl.cm.ScalarMappable(norm, colours), ax=axes, label=metric, pad=0.01)
    return figure


def _layout(stages: Sequence[ForestStage]) -> tuple[dict[int, float], int]:
    """Return a row for each stage.

    Leaves are placed one below the other, a parent on the row of its longest continuation.
    """
    children: dict[int | None, list[ForestStage]] = {}
    for stage in stages:
        children.setdefault(stage.parent, []).append(stage)
    reach: dict[int, int] = {}
    for stage in reversed(stages):  # visit children before their parents
        below = (reach[child.index] for child in children.get(stage.index, ()))
        reach[stage.index] = max(below, default=stage.stop)
    rows: dict[int, float] = {}
    num_rows = 0
    stack = sorted(children.get(None, ()), key=lambda s: (reach[s.index], s.index))
    on_new_row = {stage.index for stage in stack}
    while stack:
        stage = stack.pop()
        if stage.index in on_new_row:
            rows[stage.index] = -float(num_rows)
            num_rows += 1
        following = sorted(children.get(stage.index, ()), key=lambda s: (reach[s.index], -s.index))
        if following:
            rows[following[-1].index] = rows[stage.index]
            on_new_row.update(child.index for child in following[:-1])
        stack.extend(following)
    return rows, num_rows
