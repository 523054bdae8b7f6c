"""Configurations that people write: whole ones, ones with gaps, and branches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from thrifty.core import ScheduleError, SpaceError, error_text

from ._coordinates import Coordinate, Coordinates
from ._domain import Choice, Domain, Float, Int
from ._space import Space, config_from_json
from .schedules import Branched, Constant


_MAX_DRAWS = 1000


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose schedules may be JSON objects, as ``thrifty best`` prints them.

    Raises:
        SpaceError: It is not a JSON object of hyper-parameters.
    """
    if not isinstance(config, Mapping):
        raise SpaceError(f'a configuration is an object such as {{"lr": 0.1}}, got {config!r}')
    try:
        return config_from_json(config)
    except SpaceError:
        raise
    except (ScheduleError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SpaceError(
            f"{dict(config)!r} has a schedule that cannot be read ({error_text(error)}); write it "
            'as {"schedule": "Step", "fields": {"value": 0.1, "milestones": [20]}}'
        ) from None


def fill_config(
    space: Space, given: Mapping[str, Any], *, rng: np.random.Generator
) -> dict[str, Any]:
    """Return a configuration of the space with the given values; the others are drawn.

    Values are returned as the space itself would draw them (``1`` from a ``Float`` is ``1.0``), so
    that equal configurations are also equal in training. Of a branch (``Branched``), what it
    branches off must be in the space; from there on it may have any value.

    Raises:
        SpaceError: A name is not in the space, a value is not in its domain, or a hyper-parameter
            has a value where its conditions do not hold.

    >>> from thrifty.space import Choice, Float, Space
    >>> space = Space(
    ...     lr=Float(0.0, 1.0), kind=Choice(["sgd", "adam"]), m=Choice([0.9]).when(kind="sgd")
    ... )
    >>> fill_config(space, {"lr": 1, "m": 0.9}, rng=np.random.default_rng(0))
    {'lr': 1.0, 'kind': 'sgd', 'm': 0.9}
    """
    picked: dict[str, Any] = {}
    branches = {name: value for name, value in given.items() if isinstance(value, Branched)}
    for name, value in {**given, **{n: _stem(value) for n, value in branches.items()}}.items():
        if name not in space.names:
            raise SpaceError(
                f"{name!r} is not in the space ({', '.join(space.names)}); name "
                "hyper-parameters of the study"
            )
        try:
            picked.update(_coordinates_of(name, value, space))
        except SpaceError as error:
            raise SpaceError(f"{error}; give a value that is") from None
    coordinates = Coordinates(space)

    def pick(coordinate: Coordinate) -> Any:
        if coordinate.name in picked:
            return _as_drawn(coordinate, picked[coordinate.name])
        domain = coordinate.domain
        return (
            int(rng.integers(len(domain.options)))
            if isinstance(domain, Choice)
            else domain.sample(rng)
        )

    # A value with a condition restricts what may be drawn, so draw until the condition holds.
    for _ in range(_MAX_DRAWS):
        config = coordinates.compose(pick)
        missing = [name for name in given if name not in config]
        if not missing:
            return {**config, **{n: _regrown(each, config[n]) for n, each in branches.items()}}
    raise SpaceError(
        f"{missing[0]!r} is there only {_conditions(space[missing[0]])}; leave it out, or give "
        "that, too"
    )


def _coordinates_of(name: str, value: Any, space: Space) -> Mapping[str, Any]:
    """Return the coordinates of a value of a hyper-parameter; a constant is its value, too."""
    found = Coordinates(_alone(name, space[name]))
    if isinstance(value, Constant):
        with suppress(SpaceError):
            return found.values({name: value})
        value = value.value
    return found.values({name: value})


def _stem(value: Any) -> Any:
    """Return the schedule that a branch, or a branch of a branch, comes from."""
    while isinstance(value, Branched):
        value = value.before
    return value


def _regrown(branch: Branched, stem: Any) -> Branched:
    """Return a branch of another stem."""
    before = branch.before
    return replace(branch, before=_regrown(before, stem) if isinstance(before, Branched) else stem)


def whole_config(space: Space, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the space as the space itself would draw it; nothing is drawn.

    Raises:
        SpaceError: A hyper-parameter that varies is left out, or for a reason of ``fill_config``.

    >>> from thrifty.space import Float, Space
    >>> whole_config(Space(lr=Float(0.0, 1.0), width=64), {"lr": 1})
    {'lr': 1.0, 'width': 64}
    """
    found = fill_config(space, given, rng=np.random.default_rng(0))
    missing = [
        name for name in found if name not in given and len(Coordinates(_alone(name, space[name])))
    ]
    if missing:
        raise SpaceError(
            f"the configuration {dict(given)!r} lacks {', '.join(missing)}; give all "
            "hyper-parameters that vary"
        )
    return found


def _alone(name: str, value: Any) -> Space:
    """Return a space of only one hyper-parameter, without its conditions."""
    return Space(**{name: _free(value)})


def _free(value: Any) -> Any:
    conditional = isinstance(value, Float | Int | Choice)
    return replace(value, conditions=()) if conditional else value


def _as_drawn(coordinate: Coordinate, value: Any) -> Any:
    if not isinstance(coordinate.domain, Float):
        return value
    if coordinate.domain.step is None:
        return float(value)
    return coordinate.from_unit(coordinate.to_unit(value))


def _conditions(domain: Domain) -> str:
    return " and ".join(
        f"where {c.name} is {' or '.join(map(repr, c.values))}" for c in domain.conditions
    )
