"""Samplers: one file each; where the configurations of new trials come from."""

from ._base import Sampler as Sampler
from ._grid import GridSampler as GridSampler
from ._gridded import GriddedSampler as GriddedSampler
from ._random import RandomSampler as RandomSampler


__all__ = ["GridSampler", "GriddedSampler", "RandomSampler", "Sampler"]
