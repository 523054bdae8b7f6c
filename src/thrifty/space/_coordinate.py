"""Coordinates of a space, and a hyper-parameter's template as a tree that contains them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ._domain import Choice, Float, Int
from .schedules import Constant, Schedule


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
