"""Samplers of Optuna, and CMA-ES by the package cmaes, which Optuna uses too."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.core import AlgorithmError
from thrifty.search._history import History
from thrifty.search._scores import Observations, coordinates_of, observe
from thrifty.space import Config, Coordinates, Space

from ._base_sampler import Source, SuggestingSampler, check_counts, load
from ._optuna_study import ObservedTrials, OptunaStudy, look, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class OptunaSampler(SuggestingSampler):
    """Sampler that asks a sampler of Optuna, after telling it the history."""

    @abstractmethod
    def make(self, optuna: Any, seen: ObservedTrials, **common: Any) -> Any:
        """Return the sampler of Optuna."""

    @abstractmethod
    def attrs(self) -> dict[str, Any]:
        """Return the system attributes of all finished trials."""

    def source(self, history: History, space: Space, rng: np.random.Generator) -> Source | None:
        """Return the model, or None as long as there is not enough to learn from.

        Raises:
            MissingExtraError: Optuna is not installed.
        """
        optuna = load("optuna")
        coordinates = coordinates_of(space)
        observed = observe(history, coordinates, min_points=self.num_startup)
        if len(observed) < self.num_startup:
            return None
        seen = look(history, observed)
        common: dict[str, Any] = {"seed": int(rng.integers(2**31))}
        constrained = any(trial.violation for trial, _ in seen.finished)
        if constrained and int(optuna.__version__.split(".")[0]) < 5:
            # Later versions read the constraints from the trials' attributes.
            common["constraints_func"] = _constraints
        with quiet(optuna):
            sampler = self.make(optuna, seen, **common)
        return OptunaStudy(optuna, sampler, seen=seen, coordinates=coordinates, attrs=self.attrs())


@dataclass(frozen=True, slots=True, kw_only=True)
class TPESampler(OptunaSampler):
    """Optuna's tree-structured Parzen estimator; never exhausted.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Watanabe,
    "Tree-Structured Parzen Estimator: Understanding Its Algorithm Components", 2023. It learns from
    the largest epoch that ``num_startup`` trials have reached; until then, configurations are
    random. It handles several objectives and constraints.

    Args:
        multivariate: Whether hyper-parameters are modelled jointly rather than each on its own.
        group: Whether those of each branch of a conditional space are modelled jointly.
        num_candidates: Number of draws of which the best is taken.
        share: Number of suggestions besides the first; of all of them, the one that shares most
            training is taken (0: the first).

    Raises:
        AlgorithmError: An option is out of range.
        MissingExtraError: Optuna is not installed (when it draws).

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> TPESampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]
    """

    multivariate: bool = True
    group: bool = True
    num_candidates: int = 24

    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""
        check_counts(self, num_candidates=self.num_candidates)

    def make(self, optuna: Any, seen: ObservedTrials, **common: Any) -> Any:
        """Return the sampler of Optuna."""
        return optuna.samplers.TPESampler(
            n_startup_trials=self.num_startup,
            n_ei_candidates=self.num_candidates,
            multivariate=self.multivariate,
            group=self.multivariate and self.group,
            constant_liar=True,
            **common,
        )

    def attrs(self) -> dict[str, Any]:
        """Return no attributes."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPSampler(OptunaSampler):
    """Optuna's Gaussian process with expected improvement; never exhausted.

    In a conditional space it models the hyper-parameters that are always present; the others are
    random. Once there are a few hundred trials it takes about a second per proposal, so it suits
    expensive trials. It handles several objectives and constraints. ``num_startup`` and ``share``
    are as in ``TPESampler``.

    Args:
        deterministic: Whether a configuration always gets the same score when it is trained again.

    Raises:
        AlgorithmError: An option is out of range.
        MissingExtraError: Optuna or SciPy is not installed (when it draws).

    >>> GPSampler(num_startup=5)
    GPSampler(num_startup=5, share=0, deterministic=False)
    """

    deterministic: bool = False

    def check(self) -> None:
        """Check nothing beyond the common options."""

    def make(self, optuna: Any, seen: ObservedTrials, **common: Any) -> Any:
        """Return the sampler of Optuna."""
        load("scipy")
        return optuna.samplers.GPSampler(
            n_startup_trials=self.num_startup, deterministic_objective=self.deterministic, **common
        )

    def attrs(self) -> dict[str, Any]:
        """Return no attributes."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NSGAIISampler(OptunaSampler):
    """Genetic algorithm that crosses and mutates the best trials; never exhausted.

    With several objectives, the best trials are those of the Pareto front. Deb et al., "A Fast and
    Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002, in its steady-state form: the parents
    are the best ``population`` of all trials so far, not of a generation, so that no generation
    waits for its last trial. It handles several objectives and constraints. ``num_startup`` and
    ``share`` are as in ``TPESampler``.

    Raises:
        AlgorithmError: An option is out of range.
        MissingExtraError: Optuna is not installed (when it draws).

    >>> NSGAIISampler(population=10)
    NSGAIISampler(num_startup=10, share=0, population=10)
    """

    population: int = 20

    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""
        check_counts(self, population=self.population)

    def make(self, optuna: Any, seen: ObservedTrials, **common: Any) -> Any:
        """Return the sampler of Optuna."""
        return optuna.samplers.NSGAIISampler(
            population_size=max(min(self.population, len(seen.finished)), 2),
            # Deb's own crossover; Optuna's default only mixes values that exist already.
            crossover=optuna.samplers.nsgaii.SBXCrossover(),
            **common,
        )

    def attrs(self) -> dict[str, Any]:
        """Return attributes that put all trials into the previous generation.

        Versions of Optuna have different names for the attribute.
        """
        return {"NSGAIISampler:generation": 0, "nsga2:generation": 0}


def _constraints(trial: Any) -> Any:
    return trial.system_attrs["constraints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CMAESSampler(SuggestingSampler):
    """Covariance matrix adaptation, by the authors of Optuna's version; never exhausted.

    Hansen, "The CMA Evolution Strategy: A Tutorial", 2016. The evolution is replayed for each
    answer. It starts from the best of the first ``num_startup`` trials, which are random, and each
    ``population`` of later trials is a generation. It moves the numerical hyper-parameters that are
    always present; choices, and what depends on them, are random.

    Args:
        population: Size of a generation (default: 4 + 3 times the logarithm of the number of
            numerical hyper-parameters).
        sigma: First step size, as a share of each hyper-parameter's range.
        share: Number of suggestions besides the first; of all of them, the one that shares most
            training is taken (0: the first).

    Raises:
        AlgorithmError: An option is out of range.
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
        optimizer = self._evolve(cmaes, seen, seen.points[:, moved], seed=int(rng.integers(2**31)))
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
