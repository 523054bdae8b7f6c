"""Samplers, one per file: they propose the configurations of new trials."""

from ._base import (
    GriddedSampler as GriddedSampler,
    GridSampler as GridSampler,
    RandomSampler as RandomSampler,
    Sampler as Sampler,
)
from ._cma_es import CMAESSampler as CMAESSampler
from ._kde import KDESampler as KDESampler
from ._optuna import (
    GPSampler as GPSampler,
    NSGAIISampler as NSGAIISampler,
    TPESampler as TPESampler,
)
from ._random_forest import RandomForestSampler as RandomForestSampler


__all__ = [
    "CMAESSampler",
    "GPSampler",
    "GridSampler",
    "GriddedSampler",
    "NSGAIISampler",
    "RandomSampler",
    "Sampler",
    "TPESampler",
]
