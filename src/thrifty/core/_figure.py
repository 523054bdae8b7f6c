"""The matplotlib figure of all plots; import it only where matplotlib is installed."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that shows itself in a notebook.

    Jupyter shows a plain ``Figure`` as text until ``matplotlib.pyplot`` is imported. A figure made
    by ``pyplot`` would be shown twice, and ``pyplot`` would keep it in memory.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
