"""Plots of a study (matplotlib), one file each; loaded on first use."""

from ._hyperparameters import (
    contour as contour,
    importance as importance,
    parallel_coordinates as parallel_coordinates,
    slice_plot as slice_plot,
)
from ._outcomes import (
    history as history,
    learning_curves as learning_curves,
    pareto_front as pareto_front,
    stage_forest as stage_forest,
)


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
