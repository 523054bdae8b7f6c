"""A configuration as flat, named coordinates, and back: the form in which models see it."""

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
    """Every domain of a space as a coordinate, also those inside schedules, tuples and options of choices.

    A coordinate is there only where its conditions hold and its branch is taken.

    >>> from thrifty.space import Constant, Cosine, Float
    >>> space = Space(lr=Choice([Constant(0.1), Cosine(Float(0.1, 0.3))]), width=64)
    >>> flat = Coordinates(space)
    >>> flat.names
    ('lr', 'lr[1].value')
    >>> flat.values({"lr": Cosine(0.2), "width": 64})
    {'lr': 1, 'lr[1].value': 0.2}
    >>> flat.from_unit(flat.to_unit({"lr": Constant(0.1), "width": 64}))
    {'lr': Constant(0.1), 'width': 64}

    Raises:
        SpaceError: two coordinates would have the same name.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        found: list[Coordinate] = []
        self._nodes = {name: tree(name, space[name], found) for name in space.names}
        self.coordinates = tuple(found)
        """All of them, in the order of the space."""
        self.names = tuple(coordinate.name for coordinate in found)
        """Their names, such as ``lr``, ``lr[1].value``, ``lr[1].milestones[0]``."""
        domains = [coordinate.domain for coordinate in found]
        self.is_choice = np.array([isinstance(d, Choice) for d in domains], dtype=bool)
        """Whether an option is picked, shape ``[d]``."""
        self.num_options = np.array(
            [len(d.options) if isinstance(d, Choice) else 0 for d in domains], dtype=int
        )
        """How many options there are (0: it is a number), shape ``[d]``."""
        self._index = {name: index for index, name in enumerate(self.names)}
        if len(self._index) < len(found):
            raise SpaceError(
                f"hyper-parameters named like parts of others ({', '.join(self.names)}); rename one"
            )

    def __len__(self) -> int:
        return len(self.coordinates)

    def compose(self, pick: Pick) -> dict[str, Any]:
        """The configuration that one gets by asking ``pick`` for each coordinate that is there.

        For a number ``pick`` gives the value, for a choice the index of the option.

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
        """What was picked, by name, for the coordinates that are there; where two options fit, the first.

        Raises:
            SpaceError: the configuration is not of this space.
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
        """The configuration in the unit cube, shape ``[d]``: nan where a coordinate is not there.

        Numbers from their lower to their upper bound (where ``log``, their logarithms), options by their index.

        Raises:
            SpaceError: the configuration is not of this space.
        """
        point = np.full(len(self.names), np.nan)
        for name, picked in self.values(config).items():
            index = self._index[name]
            point[index] = self.coordinates[index].to_unit(picked)
        return point

    def from_unit(self, point: FloatArray) -> dict[str, Any]:
        """The configuration nearest to a point of the unit cube, shape ``[d]``; what is not there is not read.

        Raises:
            SpaceError: a coordinate is nan that is there.
        """

        def pick(coordinate: Coordinate) -> Any:
            position = float(point[self._index[coordinate.name]])
            if math.isnan(position):
                raise SpaceError(f"{coordinate.name} is there but its position is not a number")
            return coordinate.from_unit(position)

        return self.compose(pick)
