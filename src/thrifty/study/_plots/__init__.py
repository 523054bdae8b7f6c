"""Plots of a study (matplotlib), one file each; loaded on first use."""

from ._contour import contour as contour
from ._history import history as history
from ._importance import importance as importance
from ._learning_curves import learning_curves as learning_curves
from ._parallel import parallel_coordinates as parallel_coordinates
from ._pareto import pareto_front as pareto_front
from ._slice import slice_plot as slice_plot
from ._stage_forest import stage_forest as stage_forest


__all__ = [
    "contour",
    "history",
    "importance",
    "learning_curves",
    "parallel_coordinates",
    "pareto_front",
    "slice_plot",
    "stage_forest",
]
