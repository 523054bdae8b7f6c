"""Plots of a study (matplotlib) by what they show; loaded on first use."""

from ._hyperparameter_plots import contour, importance, parallel_coordinates, slice_plot
from ._outcomes import history, learning_curves, pareto_front, scaling_law, stage_forest


__all__ = [
    "contour",
    "history",
    "importance",
    "learning_curves",
    "parallel_coordinates",
    "pareto_front",
    "scaling_law",
    "slice_plot",
    "stage_forest",
]
