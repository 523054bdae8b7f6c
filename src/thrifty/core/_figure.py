"""The matplotlib figure of all plots, and what several plots share: colours, names, ticks, limits.

Import it only where matplotlib is installed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ._errors import plain_text


COLOURS = "viridis"


class NotebookFigure(Figure):
    """A figure that shows itself in a notebook.

    Jupyter shows a plain ``Figure`` as text until ``matplotlib.pyplot`` is imported. A figure made
    by ``pyplot`` would be shown twice, and ``pyplot`` would keep it in memory.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


def escaped(name: str) -> str:
    """Escape a name for matplotlib, which would set text between dollar signs as mathematics.

    >>> print(escaped("cost_$"))
    cost_\\$
    """
    return plain_text(name).replace("$", r"\$")


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
