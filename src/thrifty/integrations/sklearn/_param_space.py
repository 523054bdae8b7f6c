"""Search spaces of scikit-learn, and estimators as text."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
from sklearn.utils import check_random_state

from thrifty.core import SpaceError
from thrifty.integrations._adapters import Describe, described
from thrifty.space import Choice, Condition, Domain, Float, Int, Schedule, Space


def by_content(value: Any, describe: Describe) -> str:
    """Describe estimators by class and parameters, other objects by a digest of their content.

    Different objects never have the same description.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from thrifty.integrations._adapters import described
    >>> described(LogisticRegression(), otherwise=by_content) == described(
    ...     LogisticRegression(C=1.0), otherwise=by_content
    ... )
    True
    """
    kind = describe(type(value))
    if hasattr(value, "get_params"):
        return f"{kind}({describe(value.get_params(deep=False))})"
    try:
        return f"{kind}:{joblib.hash(value)}"
    except (pickle.PicklingError, AttributeError, TypeError):
        return f"{value!r} at {id(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpace:
    """A search space, and the objects that its positions refer to.

    ``objects`` maps each hyper-parameter whose options are not plain values (estimators, functions)
    to these options. The space contains their positions.
    """

    space: Space
    objects: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, distributions: object) -> ParamSpace:
        """Return the search space of ``param_distributions``.

        Values may be domains, schedules, lists, SciPy distributions or fixed values.

        Raises:
            SpaceError: It is not a dictionary, or a value is none of these.

        >>> from scipy.stats import loguniform
        >>> ParamSpace.of({"alpha": loguniform(1e-5, 1e-1), "loss": ["hinge", "log_loss"]}).space
        Space(alpha=Float(low=1e-05, high=0.1, log=True, step=None, conditions=()),
        loss=Choice(options=('hinge', 'log_loss'), conditions=()))
        """
        if not isinstance(distributions, Mapping) or not all(
            isinstance(n, str) for n in distributions
        ):
            raise SpaceError(
                f"param_distributions is {distributions!r}; give a dictionary from a parameter's "
                "name to what it may be"
            )
        objects: dict[str, tuple[Any, ...]] = {}
        params: dict[str, Any] = {}
        for name, value in distributions.items():
            params[name] = _template(name, value)
            if params[name] is None and value is not None:
                objects[name] = tuple(value)
                params[name] = Choice(range(len(objects[name])))
        return cls(space=Space(**params), objects=objects)

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration as ``set_params`` takes it."""
        return {
            name: self.objects[name][value] if name in self.objects else value
            for name, value in config.items()
        }


@dataclass(frozen=True, slots=True, repr=False)
class Distributed(Domain):
    """Values drawn from a SciPy distribution, or from any object with ``rvs(random_state=)``."""

    distribution: Any
    conditions: tuple[Condition, ...] = ()

    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one value."""
        # All distributions that scikit-learn accepts take its own kind of random stream.
        stream = check_random_state(int(rng.integers(2**32)))
        return _item(self.distribution.rvs(random_state=stream))

    def levels(self, num: int) -> tuple[Any, ...]:
        """Return at most ``num`` values: the midpoints of equally likely parts."""
        if not hasattr(self.distribution, "ppf"):
            raise SpaceError(f"{self!r} has no quantiles to make a grid of; give a list of values")
        middles = (np.arange(num) + 0.5) / num
        return tuple(dict.fromkeys(_item(self.distribution.ppf(q)) for q in middles))

    def size(self) -> float:
        """Return infinity, because the number of values is unknown."""
        return math.inf

    def when(self, **parents: Any) -> Distributed:
        """Return the same domain, active only when other hyper-parameters have these values."""
        conditions = Float(0, 1).when(**parents).conditions
        return dataclasses.replace(self, conditions=(*self.conditions, *conditions))

    def __repr__(self) -> str:
        frozen = self.distribution
        if hasattr(frozen, "dist"):
            arguments = [*map(repr, frozen.args), *(f"{k}={v!r}" for k, v in frozen.kwds.items())]
            return f"{frozen.dist.name}({', '.join(arguments)})"
        # An address in memory would make it a different study in each process.
        return described(frozen, otherwise=by_content)


def _template(name: str, value: Any) -> Any:
    """Return the entry in the space; None for options that must be stored in ``objects``."""
    if hasattr(value, "rvs"):
        return _domain(value)
    if isinstance(value, np.ndarray) or (hasattr(value, "tolist") and hasattr(value, "iloc")):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Choice(list(value)) if all(map(_is_plain, value)) else None
    if _is_plain(value):
        return value
    raise SpaceError(
        f"param_distributions[{name!r}] is {value!r}; give a list of values, a distribution with "
        "rvs, a domain such as "
        "thrifty.Float(1e-5, 1e-1, log=True), or a schedule"
    )


def _domain(distribution: Any) -> Domain:
    """Return the equivalent domain where there is one, because samplers can use it best.

    An equivalent domain has the same values with the same probabilities.
    """
    name = getattr(getattr(distribution, "dist", None), "name", "")
    if name in ("uniform", "loguniform", "reciprocal", "randint"):
        low, high = (_item(end) for end in distribution.support())
        _, loc, _ = distribution.dist._parse_args(*distribution.args, **distribution.kwds)
        if name == "randint":
            return Int(int(low), int(high))
        if name == "uniform":
            return Float(low, high)
        if not loc:
            return Float(low, high, log=True)
    return Distributed(distribution)


def _is_plain(value: Any) -> bool:
    """Return whether the space can hold the value and returns it unchanged."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float | np.floating):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str | np.generic | Domain | Schedule)


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value
