"""A study as an Optuna study in memory, for Optuna's tools. Optuna is optional: it is loaded on the first call."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import MissingExtraError
from thrifty.space import Choice, Coordinate, Coordinates, Int, Space

from ._comparable import picked_by
from ._names import option_names
from ._results import TrialResult


if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution


logger = logging.getLogger(__name__)


def optuna_study(
    trials: Sequence[TrialResult], space: Space, *, metrics: Sequence[str], modes: Sequence[str]
) -> optuna.Study:
    """A copy in memory: every coordinate of the space is a parameter, learning curves are intermediate values.

    Options of choices are shown as one would write them. Finished trials are complete, those that were stopped or
    wait are pruned, each with the value that it *ended* with: after few epochs that is not comparable with a
    finished training, so ask such a study about its complete trials only, or use ``study.importance``, which
    compares trials at an epoch that they have in common. Trials that are not of the space (a population's, whose
    schedules changed on the way) are left out.

    >>> from thrifty.space import Float
    >>> trial = TrialResult(number=0, config={"lr": 0.1}, state="done", epochs=2, value=0.5, curve=(0.7, 0.5))
    >>> study = optuna_study([trial], Space(lr=Float(0.01, 1, log=True)), metrics=["loss"], modes=["min"])
    >>> study.best_params, study.best_value, study.best_trial.intermediate_values
    ({'lr': 0.1}, 0.5, {1: 0.7, 2: 0.5})

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    module = load_optuna()
    coordinates = Coordinates(space)
    distributions = {c.name: distribution(c) for c in coordinates.coordinates}
    study = empty_study(metrics=metrics, modes=modes)
    left_out = 0
    for trial in trials:
        picked = picked_by(trial, coordinates)
        if picked is None:
            left_out += 1
            continue
        own = {name: distributions[name] for name in picked}
        state, values = _outcome(trial, metrics)
        study.add_trial(
            module.trial.create_trial(
                state=module.trial.TrialState[state],
                values=values,
                params={name: external(own[name], value) for name, value in picked.items()},
                distributions=own,
                user_attrs={
                    "thrifty:trial": trial.number,
                    "thrifty:epochs": trial.epochs,
                    "thrifty:error": trial.error,
                },
                intermediate_values={
                    epoch: value
                    for epoch, value in enumerate(trial.curve, start=1)
                    if math.isfinite(value)
                },
            )
        )
    if left_out:
        logger.info("%d trials that are not of the space are not in the Optuna study", left_out)
    return study


def empty_study(*, metrics: Sequence[str], modes: Sequence[str]) -> optuna.Study:
    """An Optuna study without trials."""
    module = load_optuna()
    directions = ["maximize" if mode == "max" else "minimize" for mode in modes]
    with _quiet("optuna.storages._in_memory"):
        study: optuna.Study = module.create_study(
            storage=module.storages.InMemoryStorage(), directions=directions
        )
    # what set_metric_names does, without its warning that it may change
    study._storage.set_study_system_attr(study._study_id, "study:metric_names", list(metrics))
    return study


def load_optuna() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("optuna")
    except ImportError:
        raise MissingExtraError("optuna", extra="optuna") from None


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps one logger silent for a moment; the verbosity that the user chose for Optuna is not ours."""

    nobody = logging.Filter("nobody")  # lets pass what a logger of this name says
    quieted = logging.getLogger(name)
    quieted.addFilter(nobody)
    try:
        yield
    finally:
        quieted.removeFilter(nobody)


def distribution(coordinate: Coordinate) -> BaseDistribution:
    """Optuna's form of a coordinate's domain."""
    optuna, domain = load_optuna().distributions, coordinate.domain
    found: BaseDistribution
    if isinstance(domain, Choice):
        found = optuna.CategoricalDistribution(option_names(domain))
    elif isinstance(domain, Int):
        # the last that is reached: Optuna warns where the steps do not end at the bound
        high = domain.levels(2)[-1]
        found = optuna.IntDistribution(domain.low, high, log=domain.log, step=domain.step)
    elif domain.step is not None:
        found = optuna.FloatDistribution(domain.low, domain.levels(2)[-1], step=domain.step)
    else:
        found = optuna.FloatDistribution(domain.low, domain.high, log=domain.log)
    return found


def external(distribution: Any, picked: Any) -> Any:
    """What Optuna calls the thing that was picked."""
    choices = getattr(distribution, "choices", None)
    return picked if choices is None else choices[picked]


def _outcome(trial: TrialResult, metrics: Sequence[str]) -> tuple[str, list[float] | None]:
    """Optuna's name of the state, and the values."""
    if trial.state == "failed":
        return "FAIL", None
    if trial.state == "running":
        return "RUNNING", None
    values = objective_values(trial, metrics)
    if values is None:
        return "FAIL", None
    return "COMPLETE" if trial.state == "done" else "PRUNED", list(values)


def objective_values(trial: TrialResult, metrics: Sequence[str]) -> tuple[float, ...] | None:
    """The trial's objectives where its training stands; None unless all are there and finite."""
    if len(metrics) == 1:
        values = [trial.value]
    else:
        values = [trial.values.get(metric) for metric in metrics]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return known if len(known) == len(values) else None
