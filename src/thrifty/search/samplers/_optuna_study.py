"""A history in the form of an Optuna study, built anew for each answer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from thrifty.search._history import History, Trial
from thrifty.search._scores import ConfigCache, Observations
from thrifty.space import Choice, Config, Coordinate, Coordinates, Float

from ._base_sampler import load


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTrials:
    """The part of a history that Optuna needs to know.

    Attributes:
        finished: Trials with their scores on each objective (None: the trial failed).
        running: Configurations in training.
        num_objectives: Number of objectives, at least 1.
    """

    finished: tuple[tuple[Trial, tuple[float, ...] | None], ...]
    running: tuple[Config, ...]
    num_objectives: int


def look(history: History, observed: Observations) -> ObservedTrials:
    """Return the observed trials for Optuna.

    A single objective is the score at the observed epoch; several objectives are the trial's
    latest.
    """
    trials = list(chain(history.prior, history))
    num_objectives = max((len(trial.objectives) for trial in trials), default=1) or 1
    # Look up by identity; trials outside the space are not among these configurations.
    configs, epoch = set(map(id, observed.configs)), observed.epoch
    finished: list[tuple[Trial, tuple[float, ...] | None]] = []
    for trial in trials:
        failed = trial.state == "failed"
        depth = trial.target if failed else trial.reached
        if id(trial.config) not in configs or depth < epoch:
            continue
        values = trial.objectives if num_objectives > 1 else trial.scores[epoch - 1 : epoch]
        known = len(values) == num_objectives and all(map(math.isfinite, values))
        finished.append((trial, values if known and not failed else None))
    return ObservedTrials(
        finished=tuple(finished), running=observed.pending, num_objectives=num_objectives
    )


class OptunaStudy:
    """Source of suggestions that asks a sampler of Optuna, after telling it all trials.

    Trials in training, and configurations that will be tried, are running trials of the study,
    which Optuna's samplers avoid. ``attrs`` are system attributes of the finished trials.
    """

    def __init__(
        self,
        optuna: Any,
        sampler: Any,
        *,
        seen: ObservedTrials,
        coordinates: Coordinates,
        attrs: dict[str, Any],
    ) -> None:
        self._optuna = optuna
        self._coordinates = coordinates
        self._terms = _terms(coordinates)
        self._trials = _Trials(optuna)
        self._tell(seen, attrs)

        def study(storage: _Trials) -> Any:
            directions = ["maximize"] * seen.num_objectives
            return optuna.create_study(storage=storage, sampler=sampler, directions=directions)

        with quiet(optuna):
            self._study = study(self._trials)
            self._narrow(study(self._trials.kinds()))
        for config in seen.running:
            self.note(config)

    def suggest(self) -> dict[str, Any]:
        """Return a configuration worth trying."""
        with quiet(self._optuna):
            trial = self._study.ask()
            config = self._coordinates.compose(lambda c: _suggest(trial, c))
        # This is one of several suggestions; it is noted later if it is chosen.
        self._trials.forget_last()
        return config

    def note(self, config: Config) -> None:
        """Record that a configuration will be tried."""
        params, distributions = self._terms.of(config)
        self._trials.add(params=params, distributions=distributions)

    def _narrow(self, kinds: Any) -> None:
        """Infer the sampling space from one trial per set of hyper-parameters, not from all."""
        sampler = self._study.sampler
        infer = sampler.infer_relative_search_space
        sampler.infer_relative_search_space = lambda _, trial: infer(kinds, trial)

    def _tell(self, seen: ObservedTrials, attrs: dict[str, Any]) -> None:
        known = [values for _, values in seen.finished if values is not None]
        worst = tuple(min(each) for each in zip(*known, strict=True))
        worst = worst or (0.0,) * seen.num_objectives
        violations = _violations(seen.finished)
        constrained = any(violations)
        for (trial, values), violation in zip(seen.finished, violations, strict=True):
            params, distributions = self._terms.of(trial.config)
            self._trials.add(
                params=params,
                distributions=distributions,
                values=values or worst,
                attrs={**attrs, "constraints": (violation,)} if constrained else attrs,
            )


class _Trials:
    """Optuna storage for one study, with only what ``ask`` and the samplers need.

    Optuna's own storage checks, copies and locks everything. Telling it a history took longer than
    sampling.
    """

    def __init__(self, optuna: Any) -> None:
        self._optuna = optuna
        self._make = optuna.trial.FrozenTrial
        self._running = optuna.trial.TrialState.RUNNING
        self._complete = optuna.trial.TrialState.COMPLETE
        self._trials: list[Any] = []
        self._directions: list[Any] = []
        self._attrs: dict[str, Any] = {}

    def add(
        self,
        *,
        params: dict[str, Any],
        distributions: dict[str, Any],
        values: Sequence[float] | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> int:
        """Add a finished trial, or a running one if it has no values; its parts must not change."""
        number = len(self._trials)
        trial = self._make(
            number=number,
            trial_id=number,
            state=self._running if values is None else self._complete,
            value=None,
            values=values,
            datetime_start=None,
            datetime_complete=None,
            params=params,
            distributions=distributions,
            user_attrs={},
            system_attrs={} if attrs is None else attrs,
            intermediate_values={},
        )
        self._trials.append(trial)
        return number

    def kinds(self) -> _Trials:
        """Return a storage with the first finished trial for each set of hyper-parameters."""
        found = _Trials(self._optuna)
        # Iterate in reverse, so that the first trial of each set remains.
        by_kind = {id(t.distributions): t for t in reversed(self._trials)}
        found._trials = sorted(by_kind.values())
        return found

    def forget_last(self) -> None:
        """Remove the last trial, which was never tried."""
        self._trials.pop()

    # The methods below are Optuna's storage interface, so their names are given.

    def create_new_study(self, directions: Sequence[Any], study_name: str | None = None) -> int:
        self._directions = list(directions)
        return 0

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        return ""

    def get_study_directions(self, study_id: int) -> list[Any]:
        return self._directions

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._attrs

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._attrs[key] = value

    def create_new_trial(self, study_id: int, template_trial: Any = None) -> int:
        return self.add(params={}, distributions={})

    def get_trial(self, trial_id: int) -> Any:
        return self._trials[trial_id]

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        attrs: dict[str, Any] = self._trials[trial_id].system_attrs
        return attrs

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,  # noqa: FBT001, FBT002 - Optuna's signature
        states: Container[Any] | None = None,
    ) -> list[Any]:
        found = [t for t in self._trials if states is None or t.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def set_trial_param(  # noqa: PLR0917 - Optuna's signature
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: Any
    ) -> None:
        trial = self._trials[trial_id]
        trial.params[param_name] = distribution.to_external_repr(param_value_internal)
        trial.distributions[param_name] = distribution

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._trials[trial_id].system_attrs[key] = value


_InTerms = tuple[dict[str, Any], dict[str, Any]]
"""Parameters and their distributions."""


class _Terms(ConfigCache[_InTerms]):
    """Cache of configurations in Optuna's terms, which must not be changed.

    Configurations with the same hyper-parameters get the same object of distributions.
    """

    def __init__(self, coordinates: Coordinates) -> None:
        optuna = load("optuna")
        self._coordinates = coordinates
        self._distributions = {c.name: _distribution(optuna, c) for c in coordinates.coordinates}
        self._kinds: dict[frozenset[str], dict[str, Any]] = {}
        super().__init__(self._in_terms)

    def _in_terms(self, config: Config) -> _InTerms:
        picked = self._coordinates.values(config)
        params = {
            c.name: _param(c, picked[c.name])
            for c in self._coordinates.coordinates
            if c.name in picked
        }
        distributions = {name: self._distributions[name] for name in params}
        return params, self._kinds.setdefault(frozenset(params), distributions)


@lru_cache(maxsize=16)
def _terms(coordinates: Coordinates) -> _Terms:
    return _Terms(coordinates)


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's messages about its studies and experimental options.

    They do not concern the user, who did not create these studies.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _violations(finished: Sequence[tuple[Trial, tuple[float, ...] | None]]) -> list[float]:
    """Return each trial's constraint violation; a failed trial gets the worst one."""
    worst = max((t.violation for t, _ in finished if math.isfinite(t.violation)), default=0.0)
    return [
        worst if values is None or not math.isfinite(trial.violation) else trial.violation
        for trial, values in finished
    ]


def _is_stepped(coordinate: Coordinate) -> bool:
    """Return whether Optuna sees the value as a number of steps, so that it stays on its grid."""
    domain = coordinate.domain
    return not isinstance(domain, Choice) and domain.step is not None and not domain.log


def _last(coordinate: Coordinate) -> int:
    return int(coordinate.domain.size()) - 1


def _distribution(optuna: Any, coordinate: Coordinate) -> Any:
    domain = coordinate.domain
    if isinstance(domain, Choice):
        return optuna.distributions.CategoricalDistribution(range(_last(coordinate) + 1))
    if _is_stepped(coordinate):
        return optuna.distributions.IntDistribution(0, _last(coordinate))
    if isinstance(domain, Float):
        return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
    return optuna.distributions.IntDistribution(domain.low, domain.high, log=True)


def _suggest(trial: Any, coordinate: Coordinate) -> Any:
    """Return the value that Optuna picks."""
    name, domain = coordinate.name, coordinate.domain
    if isinstance(domain, Choice):
        return trial.suggest_categorical(name, range(_last(coordinate) + 1))
    if _is_stepped(coordinate):
        last = _last(coordinate)
        return coordinate.from_unit(trial.suggest_int(name, 0, last) / max(last, 1))
    if isinstance(domain, Float):
        return trial.suggest_float(name, domain.low, domain.high, log=domain.log)
    return trial.suggest_int(name, domain.low, domain.high, log=True)


def _param(coordinate: Coordinate, picked: Any) -> Any:
    """Return a picked value in the form that Optuna is told."""
    if _is_stepped(coordinate):
        return round(coordinate.to_unit(picked) * _last(coordinate))
    return picked
