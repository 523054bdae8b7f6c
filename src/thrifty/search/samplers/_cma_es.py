"""Sampler with a covariance matrix adaptation evolution strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.core import AlgorithmError
from thrifty.search._history import History
from thrifty.search._observations import Observations, coordinates_of, observe
from thrifty.space import Config, Coordinates, Space

from ._base_sampler import Source, SuggestingSampler, check_counts, load


@dataclass(frozen=True, slots=True, kw_only=True)
class CMAESSampler(SuggestingSampler):
    """Covariance matrix adaptation, by the authors of Optuna's version; never exhausted.

    Hansen, "The CMA Evolution Strategy: A Tutorial", 2016. The evolution is replayed for each
    answer. It starts from the best of the first ``num_startup`` trials, which are random, and each
    ``population`` of later trials is a generation. It moves the numerical hyper-parameters that are
    always present; choices, and what depends on them, are random.

    Args:
        population: size of a generation (default: 4 + 3 times the logarithm of the number of
            numerical hyper-parameters).
        sigma: first step size, as a share of each hyper-parameter's range.
        share: number of suggestions besides the first; of all of them, the one that shares most
            training is taken (0: the first).

    Raises:
        AlgorithmError: an option is out of range.
        MissingExtraError: the package cmaes is not installed (when it draws).

    >>> CMAESSampler(population=8)
    CMAESSampler(num_startup=10, share=0, population=8, sigma=0.16666666666666666)
    """

    population: int | None = None
    sigma: float = 1 / 6

    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""
        if self.population is not None:
            check_counts(self, population=self.population)
        if self.population == 1:
            raise AlgorithmError(
                "CMAESSampler(population=1): nothing to select from; use 2 or more"
            )
        if not 0 < self.sigma <= 1:
            raise AlgorithmError(
                f"CMAESSampler(sigma={self.sigma!r}): sigma must be a part of the range, "
                "above 0 and up to 1"
            )

    def source(self, history: History, space: Space, rng: np.random.Generator) -> Source | None:
        """Return the model, or None as long as there is not enough to learn from.

        Raises:
            MissingExtraError: the package cmaes is not installed.
        """
        cmaes = load("cmaes")
        coordinates = coordinates_of(space)
        seen = observe(history, coordinates, min_points=self.num_startup)
        moved = [
            index
            for index, coordinate in enumerate(coordinates.coordinates)
            if not coordinates.is_choice[index]
            and coordinate.domain.size() > 1
            and not np.isnan(seen.points[:, index]).any()
        ]
        if len(seen) < self.num_startup or not moved:
            return None
        optimizer = self._evolve(
            cmaes, seen, seen.points[:, moved], seed=int(rng.integers(2**31))
        )
        return _Evolution(
            optimizer=optimizer, moved=moved, space=space, coordinates=coordinates, rng=rng
        )

    def _evolve(
        self, cmaes: Any, seen: Observations, points: npt.NDArray[np.float64], *, seed: int
    ) -> Any:
        optimizer = cmaes.CMA(
            mean=points[int(np.argmax(seen.scores[: self.num_startup]))],
            sigma=self.sigma,
            bounds=np.array([[0.0, 1.0]] * points.shape[1]),
            seed=seed,
            population_size=self.population,
        )
        told = list(zip(points, -seen.scores, strict=True))[self.num_startup :]
        size = optimizer.population_size
        for start in range(0, len(told) - size + 1, size):
            optimizer.tell(told[start : start + size])
        return optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evolution:
    """Source that draws from the state of the evolution; a batch spreads without further help."""

    optimizer: Any
    moved: list[int]
    space: Space
    coordinates: Coordinates
    rng: np.random.Generator

    def suggest(self) -> dict[str, Any]:
        """Return a configuration worth trying."""
        point = self.coordinates.to_unit(self.space.sample(self.rng))
        point[self.moved] = self.optimizer.ask()
        return self.coordinates.from_unit(point)

    def note(self, config: Config) -> None:
        """Ignore the configuration, because two draws differ anyway."""
