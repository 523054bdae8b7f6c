"""Draws that are spread evenly, an experiment: a lattice in as many dimensions as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thrifty.search import History, Sampler
from thrifty.search._scores import coordinates_of
from thrifty.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSampler(Sampler):
    """Draws the next points of the sequence R_d (Martin Roberts, 2018), shifted by chance.

    The shift follows from the first draw of the study, which is random.
    """

    adapts: ClassVar[bool] = False

    def sample(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[dict[str, Any]]:
        coordinates, before = coordinates_of(space), len(history)
        out = [] if before else [space.sample(rng)]
        shift = coordinates.to_unit(history[0].config if before else out[0])
        steps = _ratio(len(coordinates)) ** -np.arange(1.0, len(coordinates) + 1)
        numbers = range(before + len(out), before + num)
        return [*out, *(coordinates.from_unit((shift + k * steps) % 1.0) for k in numbers)]


def _ratio(dimensions: int) -> float:
    """Return the golden ratio of some dimensions: the root of ``x**(d + 1) == x + 1``."""
    found = 2.0
    for _ in range(64):
        found = (1 + found) ** (1 / (dimensions + 1))
    return found
