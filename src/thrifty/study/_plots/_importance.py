"""Plot of hyper-parameter importance."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thrifty.study._names import escaped, shorten

from ._axes import tidy


def importance(shares: Mapping[str, float], *, metric: str) -> Figure:
    """Plot a bar for each share, the largest on top."""
    ranked = sorted(shares.items(), key=lambda item: item[1])
    figure = Figure(figsize=(7, 1.2 + 0.32 * len(ranked)), layout="constrained")
    axes: Axes = figure.add_subplot()
    names = [escaped(shorten(name, limit=40)) for name, _ in ranked]
    bars = axes.barh(range(len(ranked)), [share for _, share in ranked], color="C0", height=0.7)
    axes.set_yticks(range(len(ranked)), names)
    axes.bar_label(bars, [f"{share:.1%}" for _, share in ranked], padding=4, fontsize=9)
    axes.set_xlim(0, 1.12 * max(shares.values(), default=1.0) or 1.0)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel(f"share in what makes trials differ in {escaped(metric)}")
    axes.tick_params(axis="y", length=0)
    tidy(axes)
    return figure
