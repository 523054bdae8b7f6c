"""Helpers that several plots share: colours, limits, and axes of coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from thrifty.core import UsageError
from thrifty.space import Choice, Coordinate, Float
from thrifty.study._identity import Comparable, is_log
from thrifty.study._preflight import escaped, option_names, short_names, shorten


FloatArray = npt.NDArray[np.float64]

COLOURS = "viridis"

_MAX_TICK_LABELS = 12
_ROOM = 0.03
"""The share of an axis beyond its ends."""


def tidy(axes: Axes) -> None:
    """Remove the top and right frame lines, which measure nothing."""
    axes.spines[["top", "right"]].set_visible(False)


def count_in_whole_ticks(axes: Axes) -> None:
    """Put the ticks of the lower axis at whole numbers: there is no half epoch or trial."""
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )


def limits(values: Sequence[float], *, mode: str) -> tuple[float, float, int]:
    """Return the range worth showing and the number of far worse values outside of it.

    Tukey's outer fence decides which values are far worse.

    >>> limits([1, 2, 3, 4, 5, 1e9], mode="min")
    (1.0, 5.0, 1)
    >>> limits([1, 2, 3, 4, 5, 1e9], mode="max")
    (1.0, 1000000000.0, 0)
    """
    if not values:
        return 0.0, 1.0, 0
    sign = 1.0 if mode == "max" else -1.0
    scores = sign * np.array(values, dtype=float)
    first, third = np.quantile(scores, [0.25, 0.75])
    inside = scores >= first - 3 * (third - first)
    ends = sorted(float(sign * end) for end in (scores[inside].min(), scores.max()))
    return ends[0], ends[1], int((~inside).sum())


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
