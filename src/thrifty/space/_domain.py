"""What a hyper-parameter may be: ``Float``, ``Int``, ``Choice``, and conditions on others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from thrifty.core import SpaceError


MAX_INT = 2**53
"""The integers up to here are all floating-point numbers."""


@dataclass(frozen=True, slots=True)
class Condition:
    """True for configurations whose hyper-parameter ``name`` has one of ``values``."""

    name: str
    values: tuple[Any, ...]

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether it is true for this (possibly partial) configuration."""
        return self.name in config and config[self.name] in self.values


class Domain(ABC):
    """The values that one hyper-parameter may take."""

    __slots__ = ()
    conditions: tuple[Condition, ...]

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """Draws one value."""

    @abstractmethod
    def levels(self, num: int) -> tuple[Any, ...]:
        """At most ``num`` values spread over the domain (a ``Choice`` gives all it has)."""

    @abstractmethod
    def size(self) -> float:
        """How many values there are (``math.inf`` for an interval)."""

    @abstractmethod
    def when(self, **parents: Any) -> Self:
        """The same domain, there only when other hyper-parameters have these values.

        A list means any of its values. More than one condition must all hold.

        >>> Float(0.8, 0.99).when(optimizer="sgd").conditions
        (Condition(name='optimizer', values=('sgd',)),)
        """


@dataclass(frozen=True, slots=True)
class Float(Domain):
    """A real interval ``[low, high]``, uniform, or log-uniform with ``log=True``.

    ``step`` snaps to ``low + i * step``. Raises SpaceError for bounds that leave nothing.

    >>> Float(1e-4, 1e-1, log=True).levels(4)
    (0.0001, 0.001, 0.01, 0.1)
    """

    low: float
    high: float
    log: bool = field(default=False, kw_only=True)
    step: float | None = field(default=None, kw_only=True)
    conditions: tuple[Condition, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        _take_numbers(self, kind=float)
        _check_interval(self)

    def sample(self, rng: np.random.Generator) -> float:
        """Draws one value."""
        if self.step is not None:
            return self._stepped(int(rng.integers(int(self.size()))))
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = float(rng.uniform(self.low, self.high))
        return min(max(value, self.low), self.high)

    def levels(self, num: int) -> tuple[float, ...]:
        """At most ``num`` values spread over the domain, both ends among them."""
        if self.low == self.high:
            return (float(self.low),)
        if self.step is not None:
            picks = np.linspace(0, int(self.size()) - 1, min(num, int(self.size())))
            return tuple(self._stepped(round(i)) for i in picks)
        space = np.geomspace if self.log else np.linspace
        # fifteen digits: so that 0.001 is 0.001, as the user would have typed it
        return tuple(self._rounded(value) for value in space(self.low, self.high, num))

    def size(self) -> float:
        """How many values there are."""
        if self.low == self.high:
            return 1
        if self.step is None:
            return math.inf
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def when(self, **parents: Any) -> Float:
        """The same domain, there only when other hyper-parameters have these values."""
        return Float(
            self.low,
            self.high,
            log=self.log,
            step=self.step,
            conditions=(*self.conditions, *_conditions(parents)),
        )

    def _stepped(self, index: int) -> float:
        assert self.step is not None
        return self._rounded(self.low + index * self.step)

    def _rounded(self, value: float) -> float:
        return min(max(float(f"{value:.15g}"), float(self.low)), float(self.high))


@dataclass(frozen=True, slots=True)
class Int(Domain):
    """The integers from ``low`` to ``high`` (both included) by ``step``, or log-uniform.

    Raises SpaceError for bounds that leave nothing.

    >>> Int(32, 256, log=True).levels(4)
    (32, 64, 128, 256)
    """

    low: int
    high: int
    log: bool = field(default=False, kw_only=True)
    step: int = field(default=1, kw_only=True)
    conditions: tuple[Condition, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        _take_numbers(self, kind=int)
        _check_interval(self)

    def sample(self, rng: np.random.Generator) -> int:
        """Draws one value."""
        if not self.log:
            return self.low + self.step * int(rng.integers(int(self.size())))
        # each integer owns the interval of half a unit to both sides of it
        value = math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return min(max(round(value), self.low), self.high)

    def levels(self, num: int) -> tuple[int, ...]:
        """At most ``num`` values spread over the domain, both ends among them."""
        if self.log and num < self.size():
            values = np.geomspace(self.low, self.high, num)
            return tuple(dict.fromkeys(round(value) for value in values))
        picks = np.linspace(0, int(self.size()) - 1, min(num, int(self.size())))
        return tuple(self.low + self.step * round(i) for i in picks)

    def size(self) -> float:
        """How many values there are."""
        return (self.high - self.low) // self.step + 1

    def when(self, **parents: Any) -> Int:
        """The same domain, there only when other hyper-parameters have these values."""
        return Int(
            self.low,
            self.high,
            log=self.log,
            step=self.step,
            conditions=(*self.conditions, *_conditions(parents)),
        )


@dataclass(frozen=True, slots=True)
class Choice(Domain):
    """One of the given options: numbers, strings, schedules, or further domains.

    Raises SpaceError if there is none, or one is there twice.

    >>> Choice(["adam", "sgd"]).size()
    2
    """

    options: Sequence[Any]
    conditions: tuple[Condition, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.options, str) or not isinstance(self.options, Sequence):
            raise SpaceError(f"Choice({self.options!r}): give a list of options")
        options = tuple(freeze(option) for option in self.options)
        if not options:
            raise SpaceError("Choice([]): the space is empty; give at least one option")
        for index, option in enumerate(options):
            if any(option == o and type(option) is type(o) for o in options[:index]):
                raise SpaceError(f"Choice: {option!r} is there twice; drop one")
        object.__setattr__(self, "options", options)

    def sample(self, rng: np.random.Generator) -> Any:
        """Draws one option."""
        return self.options[int(rng.integers(len(self.options)))]

    def levels(self, num: int) -> tuple[Any, ...]:
        """All options."""
        return tuple(self.options)

    def size(self) -> float:
        """How many options there are."""
        return len(self.options)

    def when(self, **parents: Any) -> Choice:
        """The same domain, there only when other hyper-parameters have these values."""
        return Choice(self.options, conditions=(*self.conditions, *_conditions(parents)))


def freeze(value: Any) -> Any:
    """Turns lists into tuples, NumPy scalars into Python's; refuses what JSON cannot hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise SpaceError(f"{value!r} is not a finite number")
    plain = value is None or isinstance(value, bool | int | float | str)
    # schedules and domains; checked by name because this file stands below theirs
    if plain or isinstance(value, Domain) or hasattr(value, "segments"):
        return value
    raise SpaceError(
        f"{value!r} cannot be a value of a hyper-parameter; use a number, a string, a bool, None, "
        "a list of those, or a schedule (and map it to your object inside the task)"
    )


def _conditions(parents: Mapping[str, Any]) -> tuple[Condition, ...]:
    if not parents:
        raise SpaceError(
            'when(): name a hyper-parameter and a value of it, such as when(optimizer="sgd")'
        )
    for name, values in parents.items():
        if isinstance(values, list) and not values:
            raise SpaceError(f"when({name}=[]) never holds; give at least one value")
    return tuple(
        Condition(name, freeze(values) if isinstance(values, list) else (freeze(values),))
        for name, values in parents.items()
    )


def _take_numbers(domain: Float | Int, *, kind: type) -> None:
    """Convert NumPy scalars among the bounds to Python's; refuse what is no number.

    Raises:
        SpaceError: A bound or a step is no number (no integer for ``Int``), or ``log`` is no bool.
    """
    owner = type(domain).__name__
    accepted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    for name in ("low", "high", "step"):
        value = getattr(domain, name)
        if value is None and name == "step" and kind is float:
            continue
        if isinstance(value, bool) or not isinstance(value, accepted):
            wanted = "an integer" if kind is int else "a number"
            hint = "; use Float for real numbers" if isinstance(value, float) else ""
            raise SpaceError(f"{owner}({name}={value!r}): {name} must be {wanted}{hint}")
        if isinstance(value, np.generic):
            plain = int(value) if isinstance(value, np.integer) else float(value)
            object.__setattr__(domain, name, plain)
    if not isinstance(domain.log, bool):
        raise SpaceError(f"{owner}(log={domain.log!r}): log must be True or False")


def _check_interval(domain: Float | Int) -> None:
    where = f"{type(domain).__name__}({domain.low!r}, {domain.high!r})"
    _check_size(domain, where)
    if domain.low > domain.high:
        raise SpaceError(f"{where}: the space is empty; low must not exceed high")
    if domain.log and domain.low <= 0:
        raise SpaceError(f"{where}: log=True needs low > 0")
    if domain.step is not None and not 0 < domain.step < math.inf:
        raise SpaceError(f"{where}: step must be positive and finite, not {domain.step!r}")
    if domain.log and domain.step not in (None, 1):
        raise SpaceError(f"{where}: log=True and step cannot be combined; drop one")


def _check_size(domain: Float | Int, where: str) -> None:
    """Raises SpaceError for bounds that arithmetic in floating point cannot handle."""
    ends = domain.low, domain.high
    if isinstance(domain, Int):
        if max(map(abs, ends)) > MAX_INT:
            raise SpaceError(
                f"{where}: bounds must be within +-2**53 ({MAX_INT:,}), because larger integers cannot "
                "be told apart in floating point; use smaller ones and scale them in your task"
            )
        return
    try:
        finite = all(math.isfinite(number) for number in (*ends, float(ends[1] - ends[0])))
    except OverflowError:  # an integer that is no float
        finite = False
    if not finite:
        raise SpaceError(f"{where}: bounds must be finite, and so must their difference")
    if domain.step and (ends[1] - ends[0]) / domain.step > MAX_INT:
        raise SpaceError(
            f"{where}: step={domain.step!r} gives more than 2**53 values; raise it"
        )
