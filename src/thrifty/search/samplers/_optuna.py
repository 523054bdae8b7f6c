"""Samplers that use Optuna."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.search._history import History
from thrifty.search._observations import coordinates_of, observe
from thrifty.space import Space

from ._base_sampler import Source, SuggestingSampler, check_counts, load
from ._optuna_study import OptunaStudy, Seen, look, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class OptunaSampler(SuggestingSampler):
    """Sampler that asks a sampler of Optuna, after telling it the history."""

    @abstractmethod
    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
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
        return OptunaStudy(
            optuna, sampler, seen=seen, coordinates=coordinates, attrs=self.attrs()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TPESampler(OptunaSampler):
    """Optuna's tree-structured Parzen estimator; never exhausted.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Watanabe,
    "Tree-Structured Parzen Estimator: Understanding Its Algorithm Components", 2023. It learns from
    the largest epoch that ``num_startup`` trials have reached; until then, configurations are
    random. It handles several objectives and constraints.

    Args:
        multivariate: whether hyper-parameters are modelled jointly rather than each on its own.
        group: whether those of each branch of a conditional space are modelled jointly.
        num_candidates: number of draws of which the best is taken.
        share: number of suggestions besides the first; of all of them, the one that shares most
            training is taken (0: the first).

    Raises:
        AlgorithmError: an option is out of range.
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

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
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
        deterministic: whether a configuration always gets the same score when it is trained again.

    Raises:
        AlgorithmError: an option is out of range.
        MissingExtraError: Optuna or SciPy is not installed (when it draws).

    >>> GPSampler(num_startup=5)
    GPSampler(num_startup=5, share=0, deterministic=False)
    """

    deterministic: bool = False

    def check(self) -> None:
        """Check nothing beyond the common options."""

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
        """Return the sampler of Optuna."""
        load("scipy")
        return optuna.samplers.GPSampler(
            n_startup_trials=self.num_startup,
            deterministic_objective=self.deterministic,
            **common,
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
        AlgorithmError: an option is out of range.
        MissingExtraError: Optuna is not installed (when it draws).

    >>> NSGAIISampler(population=10)
    NSGAIISampler(num_startup=10, share=0, population=10)
    """

    population: int = 20

    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""
        check_counts(self, population=self.population)

    def make(self, optuna: Any, seen: Seen, **common: Any) -> Any:
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
