"""Conversion of a space to Optuna's terms, for its tools.

Optuna is optional: it is loaded on the first call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from thrifty.core import (
    require,
)
from thrifty.space import Choice, Coordinate, Int

from ._preflight import option_names


if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution


def empty_study(*, metrics: Sequence[str], modes: Sequence[str]) -> optuna.Study:
    """Return an Optuna study without trials."""
    module = load_optuna()
    directions = ["maximize" if mode == "max" else "minimize" for mode in modes]
    with _quiet("optuna.storages._in_memory"):
        study: optuna.Study = module.create_study(
            storage=module.storages.InMemoryStorage(), directions=directions
        )
    # This is what set_metric_names does, without its warning about an experimental feature.
    study._storage.set_study_system_attr(study._study_id, "study:metric_names", list(metrics))
    return study


def load_optuna() -> Any:
    """Return the module ``optuna``.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    return require("optuna", extra="optuna")


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence one logger in this context without changing the user's verbosity for Optuna."""

    nobody = logging.Filter("nobody")  # only passes records of a logger named "nobody"
    quieted = logging.getLogger(name)
    quieted.addFilter(nobody)
    try:
        yield
    finally:
        quieted.removeFilter(nobody)


def distribution(coordinate: Coordinate) -> BaseDistribution:
    """Return Optuna's distribution for a coordinate's domain."""
    optuna, domain = load_optuna().distributions, coordinate.domain
    found: BaseDistribution
    if isinstance(domain, Choice):
        found = optuna.CategoricalDistribution(option_names(domain))
    elif isinstance(domain, Int):
        # The last value that is reached: Optuna warns if the steps do not end at the bound.
        high = domain.levels(2)[-1]
        found = optuna.IntDistribution(domain.low, high, log=domain.log, step=domain.step)
    elif domain.step is not None:
        found = optuna.FloatDistribution(domain.low, domain.levels(2)[-1], step=domain.step)
    else:
        found = optuna.FloatDistribution(domain.low, domain.high, log=domain.log)
    return found


def external(distribution: Any, picked: Any) -> Any:
    """Return Optuna's representation of a pick."""
    choices = getattr(distribution, "choices", None)
    return picked if choices is None else choices[picked]
