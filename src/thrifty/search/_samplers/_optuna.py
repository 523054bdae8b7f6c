"""Samplers of Optuna."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.search._check import check_counts
from thrifty.search._history import History
from thrifty.search._observations import coordinates_of, observe
from thrifty.space import Space

from ._optuna_study import OptunaStudy, Seen, look, quiet
from ._suggesting import Source, SuggestingSampler, load


@dataclass(frozen=True, slots=True, kw_only=True)
class OptunaSampler(SuggestingSampler):
    """Asks a sampler of Optuna that has been told of the history."""

    @abstractmethod
    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
        """The sampler of Optuna."""

    @abstractmethod
    def attrs(self) -> dict[str, Any]:
        """System attributes of all finished trials."""

    def source(self, history: History, space: Space, rng: np.random.Generator) -> Source | None:
        """The model, or None as long as there is not enough to learn from.

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
            # later versions look at the trials' attributes without being asked
            common["constraints_func"] = _constraints
        with quiet(optuna):
            sampler = self.make(optuna, seen, **common)
        return OptunaStudy(
            optuna, sampler, seen=seen, coordinates=coordinates, attrs=self.attrs()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TPESampler(OptunaSampler):
    """Optuna's tree-structured Parzen estimator; never exhausted.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Watanabe, "Tree-Structured Parzen
    Estimator: Understanding Its Algorithm Components", 2023. It learns from the largest epoch that ``num_startup`` trials
    have reached; until there are so many, configurations are random. Handles objectives and constraints.

    Args:
        multivariate: whether hyper-parameters are modelled together rather than each on its own.
        group: whether those of each branch of a conditional space are.
        num_candidates: of how many draws the best is taken.
        share: of this many suggestions besides the first, the one that shares most training is taken (0: the first).

    >>> from thrifty.search import History
    >>> from thrifty.space import Choice, Space
    >>> space, rng = Space(lr=Choice([0.1])), np.random.default_rng(0)
    >>> TPESampler().sample(History(), space, num=1, rng=rng)
    [{'lr': 0.1}]

    Raises:
        AlgorithmError: an option is out of its range.
        MissingExtraError: Optuna is not installed (when it draws).
    """

    multivariate: bool = True
    group: bool = True
    num_candidates: int = 24

    def check(self) -> None:
        """Raises AlgorithmError for options that make no sense."""
        check_counts(self, num_candidates=self.num_candidates)

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
        """The sampler of Optuna."""
        return optuna.samplers.TPESampler(
            n_startup_trials=self.num_startup,
            n_ei_candidates=self.num_candidates,
            multivariate=self.multivariate,
            group=self.multivariate and self.group,
            constant_liar=True,
            **common,
        )

    def attrs(self) -> dict[str, Any]:
        """None."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPSampler(OptunaSampler):
    """Optuna's Gaussian process with expected improvement; never exhausted.

    Of a conditional space it models what is always there; the rest is random. It takes about a second for each proposal
    once there are a few hundred trials, and suits expensive trials. Handles objectives and constraints; ``num_startup`` and ``share`` as in ``TPESampler``.

    Args:
        deterministic: whether a configuration trained again would score the same.

    >>> GPSampler(num_startup=5)
    GPSampler(num_startup=5, share=0, deterministic=False)

    Raises:
        AlgorithmError: an option is out of its range.
        MissingExtraError: Optuna or SciPy is not installed (when it draws).
    """

    deterministic: bool = False

    def check(self) -> None:
        """Nothing beyond what all have."""

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
        """The sampler of Optuna."""
        load("scipy")
        return optuna.samplers.GPSampler(
            n_startup_trials=self.num_startup,
            deterministic_objective=self.deterministic,
            **common,
        )

    def attrs(self) -> dict[str, Any]:
        """None."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NSGAIISampler(OptunaSampler):
    """Crosses and mutates the best trials, those of the Pareto front where there are several objectives; never exhausted.

    Deb et al., "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002, in its steady-state form: the parents are the
    best ``population`` of all trials so far, not of a generation, for no generation waits for its last trial.
    Handles objectives and constraints; ``num_startup`` and ``share`` as in ``TPESampler``.

    >>> NSGAIISampler(population=10)
    NSGAIISampler(num_startup=10, share=0, population=10)

    Raises:
        AlgorithmError: an option is out of its range.
        MissingExtraError: Optuna is not installed (when it draws).
    """

    population: int = 20

    def check(self) -> None:
        """Raises AlgorithmError for options that make no sense."""
        check_counts(self, population=self.population)

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
        """The sampler of Optuna."""
        return optuna.samplers.NSGAIISampler(
            population_size=max(min(self.population, len(seen.finished)), 2),
            # Deb's own; Optuna's default only mixes the values that are there already
            crossover=optuna.samplers.nsgaii.SBXCrossover(),
            **common,
        )

    def attrs(self) -> dict[str, Any]:
        """All trials are of the generation before, by the names that versions of Optuna have for it."""
        return {"NSGAIISampler:generation": 0, "nsga2:generation": 0}


def _constraints(trial: Any) -> Any:
    return trial.system_attrs["constraints"]
