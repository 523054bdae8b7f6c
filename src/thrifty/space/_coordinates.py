"""Coordinates: hyper-parameters as points of the unit cube, and back.

Configurations that people write may have gaps, and may be branches. What they lack is drawn by
coordinates (``fill_config``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from thrifty.core import ScheduleError, SpaceError, error_text

from ._domain import Choice, Domain, Float, Int, freeze, values_text
from ._pieces import FloatArray
from ._space import Config, Space, config_from_json
from .schedules import Branched, Constant, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """One pick: a number, or the index of a choice's option (which may hold further domains).

    >>> coordinate = Coordinate(name="width", domain=Int(10, 30, step=10))
    >>> coordinate.to_unit(20), coordinate.from_unit(0.9)
    (0.5, 30)
    """

    name: str
    domain: Float | Int | Choice

    def to_unit(self, picked: float) -> float:
        """Return the position of a picked value between 0 and 1."""
        low, high = self._ends()
        return (self._straight(picked) - low) / (high - low) if high > low else 0.0

    def from_unit(self, position: float) -> Any:
        """Return the value, or the index of the option, nearest to a position from 0 to 1."""
        low, high = self._ends()
        place = low + min(max(position, 0.0), 1.0) * (high - low)
        domain = self.domain
        if isinstance(domain, Choice):
            return round(place)
        if domain.log:
            # The logarithm of a bound may not lead back to the bound.
            value = min(max(math.exp(place), domain.low), domain.high)
            return round(value) if isinstance(domain, Int) else value
        if isinstance(domain, Int):
            return domain.low + domain.step * round(place)
        return min(place, domain.high) if domain.step is None else domain._stepped(round(place))

    def _straight(self, picked: float) -> float:
        """Map a picked value to the scale on which the domain is uniform."""
        domain = self.domain
        if isinstance(domain, Choice):
            return picked
        if domain.log:
            return math.log(picked)
        return picked if domain.step is None else round((picked - domain.low) / domain.step)

    def _ends(self) -> tuple[float, float]:
        """Return the bounds of that scale."""
        domain = self.domain
        if isinstance(domain, Choice) or (domain.step is not None and not domain.log):
            return 0, domain.size() - 1
        return self._straight(domain.low), self._straight(domain.high)


Pick = Callable[[Coordinate], Any]


class Node(ABC):
    """A part of a space's template."""

    __slots__ = ()

    @abstractmethod
    def build(self, pick: Pick) -> Any:
        """Build the value from the picks."""

    @abstractmethod
    def find(self, value: Any, found: dict[str, Any]) -> bool:
        """Record the picks that give this value; return False if no picks give it."""


@dataclass(frozen=True, slots=True)
class _Fixed(Node):
    value: Any

    def build(self, pick: Pick) -> Any:
        return self.value

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        # repr tells 1, 1.0 and True apart at any depth, as equality of schedules does.
        same = bool(self.value == value)
        return same and (isinstance(value, Schedule) or repr(self.value) == repr(value))


@dataclass(frozen=True, slots=True)
class _Number(Node):
    coordinate: Coordinate

    def build(self, pick: Pick) -> Any:
        return pick(self.coordinate)

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        domain = self.coordinate.domain
        assert not isinstance(domain, Choice)
        kinds = int if isinstance(domain, Int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        found[self.coordinate.name] = value
        inside = domain.low <= value <= domain.high
        if inside and domain.step is not None and not domain.log:
            steps = (value - domain.low) / domain.step
            return abs(steps - round(steps)) < 1e-6
        return inside


@dataclass(frozen=True, slots=True)
class _Options(Node):
    coordinate: Coordinate
    options: tuple[Node, ...]

    def build(self, pick: Pick) -> Any:
        return self.options[pick(self.coordinate)].build(pick)

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        for index, option in enumerate(self.options):
            inside: dict[str, Any] = {}
            if option.find(value, inside):
                found[self.coordinate.name] = index
                found.update(inside)
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Items(Node):
    items: tuple[Node, ...]

    def build(self, pick: Pick) -> Any:
        return tuple(item.build(pick) for item in self.items)

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        if not isinstance(value, tuple) or len(value) != len(self.items):
            return False
        return all(i.find(v, found) for i, v in zip(self.items, value, strict=True))


@dataclass(frozen=True, slots=True)
class _Fields(Node):
    template: Schedule
    fields: dict[str, Node]

    def build(self, pick: Pick) -> Any:
        picked = {name: node.build(pick) for name, node in self.fields.items()}
        return replace(self.template, **picked)  # type: ignore[type-var]

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        return type(value) is type(self.template) and all(
            node.find(getattr(value, name), found) for name, node in self.fields.items()
        )


@dataclass(frozen=True, slots=True)
class _Wrapped(Node):
    """A field that expects a schedule: a plain value there becomes a constant schedule."""

    inside: Node

    def build(self, pick: Pick) -> Any:
        return self.inside.build(pick)

    def find(self, value: Any, found: dict[str, Any]) -> bool:
        return self.inside.find(value.value if isinstance(value, Constant) else value, found)


def tree(name: str, value: Any, found: list[Coordinate], *, wrap: bool = False) -> Node:
    """Return the tree of a template; add each coordinate to ``found``, parents first."""
    if isinstance(value, Choice):
        coordinate = Coordinate(name=name, domain=value)
        found.append(coordinate)
        options = [
            tree(f"{name}[{index}]", option, found, wrap=wrap)
            for index, option in enumerate(value.options)
        ]
        return _Options(coordinate, tuple(options))
    if isinstance(value, Schedule) and value.is_template():
        return _Fields(
            value,
            {
                f.name: tree(
                    f"{name}.{f.name}", getattr(value, f.name), found, wrap=f.type == "Schedule"
                )
                for f in fields(value)  # type: ignore[arg-type]
            },
        )
    node: Node = _Fixed(value)
    if isinstance(value, Float | Int):
        found.append(Coordinate(name=name, domain=value))
        node = _Number(found[-1])
    elif isinstance(value, tuple):
        node = _Items(tuple(tree(f"{name}[{i}]", v, found) for i, v in enumerate(value)))
    return _Wrapped(node) if wrap and not isinstance(value, Schedule) else node


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
                raise SpaceError(
                    f"{name}={given[name]!r} is not in the space; "
                    f"{name} must be {values_text(self._space[name])}"
                )
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
        picked.update(_coordinates_of(name, value, space))
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
