"""Plot of the stage forest: stages trained once, and the trials that share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.plan import ForestStage

from ._axes import COLOURS


def stage_forest(stages: Sequence[ForestStage], *, metric: str, saved_epochs: int) -> Figure:
    """Plot every stage as a bar over its epochs.

    The thickness shows the number of trials in the stage, the colour the metric at its end.
    """
    rows, num_rows = _layout(stages)
    height = min(max(2.5, 0.11 * num_rows + 1.2), 40)
    figure = Figure(figsize=(9, height), layout="constrained")
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
                [stage.start] * 2,
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
            [stage.start, stage.stop],
            [y, y],
            color=colour,
            linewidth=1.5 + 2.0 * math.log2(max(stage.num_trials, 1)),
            solid_capstyle="butt",
            zorder=2,
        )
    axes.set_xlabel("epoch")
    axes.set_yticks([])
    axes.margins(x=0.01, y=0.06)
    axes.spines[["top", "right", "left"]].set_visible(False)
    trained = sum(s.stop - s.start for s in stages if s.state == "done")
    axes.set_title(
        f"{trained:,} epochs trained once, {saved_epochs:,} not trained again; thickness: "
        "trials that share the stage",
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
        following = sorted(
            children.get(stage.index, ()), key=lambda s: (reach[s.index], -s.index)
        )
        if following:
            rows[following[-1].index] = rows[stage.index]
            on_new_row.update(child.index for child in following[:-1])
        stack.extend(following)
    return rows, num_rows
