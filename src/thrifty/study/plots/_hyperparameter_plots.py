"""Pictures of hyper-parameters and what they do to the metric, and their axes of coordinates."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from thrifty.core import UsageError
from thrifty.core._figure import COLOURS, NotebookFigure, escaped, limits, tidy
from thrifty.space import Choice, Coordinate, Float, Space
from thrifty.store._reports import trials_text
from thrifty.study._identity import Comparable, comparable, is_log
from thrifty.study._importance import distinct_names, option_names
from thrifty.study._results import TrialResult


FloatArray = npt.NDArray[np.float64]


def importance(
    shares: Mapping[str, float], *, metric: str, basis: str = "", one_value: Collection[str] = ()
) -> Figure:
    """Plot a bar for each share, the largest on top.

    Args:
        shares: The share of each hyper-parameter.
        metric: The metric whose differences they explain.
        basis: What the shares come from.
        one_value: Hyper-parameters of which all compared trials have the same value.
    """
    ranked = sorted(shares.items(), key=lambda item: item[1])
    figure = NotebookFigure(figsize=(7, 1.2 + 0.32 * len(ranked)), layout="constrained")
    axes: Axes = figure.add_subplot()
    names = [escaped(shorten(name, limit=40)) for name, _ in ranked]
    bars = axes.barh(range(len(ranked)), [share for _, share in ranked], color="C0", height=0.7)
    axes.set_yticks(range(len(ranked)), names)
    labels = ["one value" if name in one_value else f"{share:.1%}" for name, share in ranked]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
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
    _say_which(figure, seen, f"{trials_text(len(seen))}; the thick line is the best")
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
    lacking = f" of {len(seen):,} have both" if len(both) < len(seen) else ""
    _say_which(figure, seen, f"{trials_text(len(both))}{lacking}; the star is the best")
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
    _say_which(figure, seen, f"{trials_text(len(seen))}{outside}; the star is the best")
    return figure


def _say_which(figure: Figure, seen: Comparable, what: str) -> None:
    """Write above a picture which trials it compares, after which epoch, and which it leaves out.

    The best trial after that epoch may not be ``Study.best_trial``, which was trained for longer.
    """
    which = f"{what} after {seen.unit.text(seen.epoch)}{seen.without}"
    chars = max(40, int(_CHARS_PER_INCH * figure.get_size_inches()[0]))
    figure.suptitle(textwrap.fill(escaped(which), chars), fontsize=9, x=0.01, ha="left")


_CHARS_PER_INCH = 15
"""How many characters of the size 9 fit an inch."""


# -- axes of coordinates --------------------------------------------------------------------

_MAX_TICK_LABELS = 12
_ROOM = 0.03
"""The share of an axis beyond its ends."""


def colours_of(values: Sequence[float], *, mode: str) -> ScalarMappable:
    """Return colours for values of the metric; far worse values share the last colour."""
    low, high, _ = limits(values, mode=mode)
    return ScalarMappable(mpl.colors.Normalize(low, high), mpl.colormaps[COLOURS])


def colour_bar(
    figure: Figure,
    axes: Axes | list[Axes],
    colours: ScalarMappable,
    *,
    label: str,
    num_outside: int,
    mode: str,
) -> None:
    """Add the colour scale, with an arrow if values lie outside."""
    towards = "min" if mode == "max" else "max"
    figure.colorbar(
        colours,
        ax=axes,
        label=escaped(label),
        pad=0.02,
        extend=towards if num_outside else "neither",
    )


def at_epoch(metric: str, seen: Comparable) -> str:
    """Return the metric's name with the epoch at which it was taken."""
    return f"{metric} after {seen.unit.text(seen.epoch)}"


def lay_axis(axes: Axes, which: str, coordinate: Coordinate, *, limit: int = 18) -> None:
    """Set up the axis ``"x"`` or ``"y"`` for a coordinate: scale, ticks and label."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_label_text(escaped(shorten(coordinate.name, limit=36)))
    domain = coordinate.domain
    if isinstance(domain, Choice):
        positions, labels = option_ticks(domain, limit=limit)
        axis.set_ticks(positions, labels)
        ends = (-0.5, len(domain.options) - 0.5)
        if which == "x" and sum(map(len, labels)) > 24:
            axes.set_xticks(positions, labels, rotation=25, ha="right", rotation_mode="anchor")
    elif is_log(coordinate):
        axes.set(**{f"{which}scale": "log"})
        if domain.high / domain.low < 1000:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
        room = (domain.high / domain.low) ** _ROOM
        ends = (domain.low / room, domain.high * room)
    else:
        room = _ROOM * (domain.high - domain.low)
        ends = (domain.low - room, domain.high + room)
    axes.set(**{f"{which}lim": ends})


def option_ticks(choice: Choice, *, limit: int) -> tuple[list[int], list[str]]:
    """Return positions and short names of options; skip some if there are too many."""
    names = short_names(option_names(choice), limit=limit)
    every = -(-len(names) // _MAX_TICK_LABELS)
    return list(range(0, len(names), every)), [escaped(name) for name in names[::every]]


def spread(
    seen: Comparable, coordinate: Coordinate, *, mode: str, width: float
) -> dict[int, float]:
    """Return each trial's position on a coordinate's axis, by its index in ``seen``.

    Trials that lack the coordinate are left out. Trials with the same option would hide each other,
    so they are placed side by side, the best last.
    """
    places = {
        index: float(picked[coordinate.name])
        for index, picked in enumerate(seen.picked)
        if coordinate.name in picked
    }
    if not isinstance(coordinate.domain, Choice):
        return places
    sign = 1.0 if mode == "max" else -1.0
    for option in set(places.values()):
        crowd = sorted(
            (i for i in places if places[i] == option), key=lambda i: sign * seen.values[i]
        )
        for rank, index in enumerate(crowd):
            places[index] = option + width * ((rank + 0.5) / len(crowd) - 0.5)
    return places


def chosen(seen: Comparable, names: Sequence[str] | None) -> list[Coordinate]:
    """Return the coordinates of these names, or all of them.

    Raises:
        UsageError: There are no comparable trials, or a name is unknown.
    """
    if not len(seen):
        raise UsageError("no trial of this space has reported yet; run the study first")
    if names is None:
        return list(seen.coordinates)
    found = []
    for name in names:
        coordinate = seen.coordinate(name)
        if coordinate is None:
            known = ", ".join(c.name for c in seen.coordinates)
            raise UsageError(f"{name!r} is not a coordinate that varies; these are: {known}")
        found.append(coordinate)
    return found


def grid_of(coordinate: Coordinate, num: int) -> FloatArray:
    """Return ``num`` values of a number from its lower to its upper bound."""
    domain = coordinate.domain
    assert not isinstance(domain, Choice)
    space = np.geomspace if is_log(coordinate) else np.linspace
    return space(domain.low, domain.high, num)


def number_ticks(coordinate: Coordinate, *, num: int) -> list[tuple[float, str]]:
    """Return about ``num`` ticks (position in [0, 1] and label) for an axis drawn by hand.

    >>> number_ticks(Coordinate(name="lr", domain=Float(0.001, 0.1, log=True)), num=5)
    [(0.0, '0.001'), (0.5, '0.01'), (1.0, '0.1')]
    """
    domain = coordinate.domain
    assert not isinstance(domain, Choice)
    if not is_log(coordinate):
        whole = not isinstance(domain, Float)
        locator = MaxNLocator(num, steps=[1, 2, 2.5, 5, 10], integer=whole)
        values = locator.tick_values(domain.low, domain.high)
        inside = [v for v in values if domain.low <= v <= domain.high]
        width = domain.high - domain.low
        return [(float((v - domain.low) / width), f"{v:.3g}") for v in inside]
    decades = math.log10(domain.high / domain.low)
    powers = range(math.floor(math.log10(domain.low)), math.ceil(math.log10(domain.high)) + 1)
    if decades >= 2:
        values = [10.0**power for power in powers[:: max(1, round(decades / num))]]
    else:
        values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    # Rounding must not lose the ends.
    inside = [v for v in values if domain.low * (1 - 1e-9) <= v <= domain.high * (1 + 1e-9)]
    if len(inside) < 2:
        inside = [domain.low, domain.high]
    return [(round(math.log10(v / domain.low) / decades, 9), f"{v:.3g}") for v in inside]


def best_of(seen: Comparable, among: Sequence[int], *, mode: str) -> int:
    """Return the index of the best of these trials; infeasible ones count only if all are."""
    feasible = [index for index in among if seen.feasible[index]] or among
    return (max if mode == "max" else min)(feasible, key=seen.values.__getitem__)


def short_names(names: Sequence[str], *, limit: int = 22) -> tuple[str, ...]:
    """Shorten each name to about ``limit`` characters, each still different from the others.

    >>> short_names(
    ...     ["Step(0.1, (30, 60, 90), gamma=0.1)", "Step(0.1, (30, 60, 90), gamma=0.3)"], limit=16
    ... )
    ('Step(0.1…ma=0.1)', 'Step(0.1…ma=0.3)')
    """
    return distinct_names([shorten(name, limit=limit) for name in names])


def shorten(name: str, *, limit: int) -> str:
    """Return the beginning and the end of a name.

    >>> shorten("Exponential(0.125)", limit=12)
    'Expone….125)'
    """
    if len(name) <= limit:
        return name
    head = limit // 2
    return f"{name[:head]}…{name[head + 1 - limit :]}"
