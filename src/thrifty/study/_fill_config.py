"""Checking and completing the configurations that a user enqueues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from thrifty.core import SpaceError
from thrifty.space import Choice, Coordinate, Coordinates, Domain, Float, Int, Space


_MAX_DRAWS = 1000


def fill_config(
    space: Space, given: Mapping[str, Any], *, rng: np.random.Generator
) -> dict[str, Any]:
    """Return a configuration of the space with the given values; the others are drawn.

    Values are returned as the space itself would draw them (``1`` from a ``Float`` is ``1.0``), so
    that equal configurations are also equal in training.

    Raises:
        SpaceError: A name is not in the space, a value is not in its domain, or a hyper-parameter
            has a value where its conditions do not hold.

    >>> space = Space(
    ...     lr=Float(0.0, 1.0), kind=Choice(["sgd", "adam"]), m=Choice([0.9]).when(kind="sgd")
    ... )
    >>> fill_config(space, {"lr": 1, "m": 0.9}, rng=np.random.default_rng(0))
    {'lr': 1.0, 'kind': 'sgd', 'm': 0.9}
    """
    picked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in space.names:
            raise SpaceError(
                f"{name!r} is not in the space ({', '.join(space.names)}); name "
                "hyper-parameters of the study"
            )
        try:
            picked.update(Coordinates(_alone(name, space[name])).values({name: value}))
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
            return config
    raise SpaceError(
        f"{missing[0]!r} is there only {_conditions(space[missing[0]])}; leave it out, or give "
        "that, too"
    )


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
