"""Configurations as flat, named coordinates and back: the form that models see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from thrifty.core import SpaceError

from ._coordinate import Coordinate, Pick, tree
from ._domain import Choice, freeze
from ._pieces import FloatArray
from ._space import Config, Space


class Coordinates:
    """Every domain of a space as a coordinate.

    This includes the domains inside schedules, tuples and options of choices. A coordinate is
    present only where its conditions hold and its branch is taken.

    Raises:
        SpaceError: Two coordinates would have the same name.

    >>> from thrifty.space import Constant, Cosine, Float
    >>> space = Space(lr=Choice([Constant(0.1), Cosine(Float(0.1, 0.3))]), width=64)
    >>> flat = Coordinates(space)
    >>> flat.names
    ('lr', 'lr[1].value')
    >>> flat.values({"lr": Cosine(0.2), "width": 64})
    {'lr': 1, 'lr[1].value': 0.2}
    >>> flat.from_unit(flat.to_unit({"lr": Constant(0.1), "width": 64}))
    {'lr': Constant(0.1), 'width': 64}
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        found: list[Coordinate] = []
        self._nodes = {name: tree(name, space[name], found) for name in space.names}
        self.coordinates = tuple(found)
        """All coordinates, in the order of the space."""
        self.names = tuple(coordinate.name for coordinate in found)
        """The coordinates' names, such as ``lr``, ``lr[1].value``, ``lr[1].milestones[0]``."""
        domains = [coordinate.domain for coordinate in found]
        self.is_choice = np.array([isinstance(d, Choice) for d in domains], dtype=bool)
        """Whether each coordinate picks an option, shape ``[d]``."""
        self.num_options = np.array(
            [len(d.options) if isinstance(d, Choice) else 0 for d in domains], dtype=int
        )
        """The number of options of each coordinate (0 for a number), shape ``[d]``."""
        self._index = {name: index for index, name in enumerate(self.names)}
        if len(self._index) < len(found):
            raise SpaceError(
                f"hyper-parameters named like parts of others ({', '.join(self.names)}); rename one"
            )

    def __len__(self) -> int:
        return len(self.coordinates)

    def compose(self, pick: Pick) -> dict[str, Any]:
        """Build a configuration by calling ``pick`` for each coordinate that is present.

        ``pick`` returns the value of a number, or the index of a choice's option.

        >>> from thrifty.space import Float
        >>> Coordinates(Space(lr=Choice([0.1, Float(0.2, 0.3)]))).compose(lambda coordinate: 0)
        {'lr': 0.1}
        """
        config: dict[str, Any] = {}
        for name in self._space._order:
            if self._space._active(name, config):
                config[name] = self._nodes[name].build(pick)
        return {name: config[name] for name in self._space.names if name in config}

    def values(self, config: Config) -> dict[str, Any]:
        """Return the picks by name for the coordinates that are present.

        If two options fit, the first one counts.

        Raises:
            SpaceError: The configuration is not of this space.
        """
        given = {name: freeze(value) for name, value in config.items()}
        found: dict[str, Any] = {}
        for name in self._space._order:
            if self._space._active(name, given) != (name in given):
                wrong = "should not be there" if name in given else "is missing"
                raise SpaceError(f"{dict(config)!r} is not of this space: {name} {wrong}")
            if name in given and not self._nodes[name].find(given[name], found):
                raise SpaceError(f"{name}={given[name]!r} is not in {self._space[name]!r}")
        for name in given:
            if name not in self._nodes:
                raise SpaceError(f"{name!r} is not in the space ({', '.join(self._nodes)})")
        return found

    def to_unit(self, config: Config) -> FloatArray:
        """Return the configuration in the unit cube, shape ``[d]``; NaN for absent coordinates.

        Numbers are scaled from their lower to their upper bound (their logarithms if ``log``),
        options by their index.

        Raises:
            SpaceError: The configuration is not of this space.
        """
        point = np.full(len(self.names), np.nan)
        for name, picked in self.values(config).items():
            index = self._index[name]
            point[index] = self.coordinates[index].to_unit(picked)
        return point

    def from_unit(self, point: FloatArray) -> dict[str, Any]:
        """Return the configuration nearest to a point of the unit cube, shape ``[d]``.

        The positions of absent coordinates are not read.

        Raises:
            SpaceError: The position of a coordinate that is present is NaN.
        """

        def pick(coordinate: Coordinate) -> Any:
            position = float(point[self._index[coordinate.name]])
            if math.isnan(position):
                raise SpaceError(f"{coordinate.name} is there but its position is not a number")
            return coordinate.from_unit(position)

        return self.compose(pick)
