"""Samplers, one per file: they propose the configurations of new trials."""

from ._base_sampler import GridSampler, QuantizedSampler, RandomSampler, Sampler
from ._kde import KDESampler
from ._optuna import CMAESSampler, GPSampler, NSGAIISampler, TPESampler
from ._random_forest import RandomForestSampler


__all__ = [
    "CMAESSampler",
    "GPSampler",
    "GridSampler",
    "KDESampler",
    "NSGAIISampler",
    "QuantizedSampler",
    "RandomForestSampler",
    "RandomSampler",
    "Sampler",
    "TPESampler",
]
