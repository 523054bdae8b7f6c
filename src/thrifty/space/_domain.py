"""Domains of hyper-parameters (``Float``, ``Int``, ``Choice``) and their conditions."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Self, TypeVar

import numpy as np

from thrifty.core import SpaceError

from ._units import Amount, EpochSize


_D = TypeVar("_D", bound="Domain")

MAX_INT = 2**53
"""Largest bound: every integer up to here is exact in floating point."""


@dataclass(frozen=True, slots=True)
class Condition:
    """True for configurations whose hyper-parameter ``name`` has one of ``values``."""

    name: str
    values: tuple[Any, ...]

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return whether the condition is true for this (possibly partial) configuration."""
        return self.name in config and config[self.name] in self.values


class Domain(ABC):
    """The values that one hyper-parameter may take."""

    __slots__ = ()
    conditions: tuple[Condition, ...]

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one value."""

    @abstractmethod
    def levels(self, num: int) -> tuple[Any, ...]:
        """Return at most ``num`` values spread over the domain (a ``Choice``: all options)."""

    @abstractmethod
    def size(self) -> float:
        """Return the number of values (``math.inf`` for an interval)."""

    @abstractmethod
    def when(self, **parents: Any) -> Self:
        """Return the same domain, present only when other hyper-parameters have these values.

        A list means any of its values. If there are several conditions, all must hold.

        >>> Float(0.8, 0.99).when(optimizer="sgd").conditions
        (Condition(name='optimizer', values=('sgd',)),)
        """


@dataclass(frozen=True, slots=True)
class Float(Domain):
    """A real interval ``[low, high]``, uniform, or log-uniform with ``log=True``.

    ``step`` snaps to ``low + i * step``. Raises SpaceError for bounds that leave no value.

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
        """Draw one value."""
        if self.step is not None:
            return self._stepped(int(rng.integers(int(self.size()))))
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = float(rng.uniform(self.low, self.high))
        return min(max(value, self.low), self.high)

    def levels(self, num: int) -> tuple[float, ...]:
        """Return at most ``num`` values spread over the domain, including both ends."""
        if self.low == self.high:
            return (float(self.low),)
        if self.step is not None:
            picks = np.linspace(0, int(self.size()) - 1, min(num, int(self.size())))
            return tuple(self._stepped(round(i)) for i in picks)
        space = np.geomspace if self.log else np.linspace
        # Fifteen digits, so that 0.001 is exactly 0.001, as the user would have typed it.
        return tuple(self._rounded(value) for value in space(self.low, self.high, num))

    def size(self) -> float:
        """Return the number of values."""
        if self.low == self.high:
            return 1
        if self.step is None:
            return math.inf
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def when(self, **parents: Any) -> Float:
        """Return the same domain, present only when other hyper-parameters have these values."""
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

    Raises SpaceError for bounds that leave no value.

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
        """Draw one value."""
        if not self.log:
            return self.low + self.step * int(rng.integers(int(self.size())))
        # Each integer owns the interval half a unit to both sides of it.
        value = math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return min(max(round(value), self.low), self.high)

    def levels(self, num: int) -> tuple[int, ...]:
        """Return at most ``num`` values spread over the domain, including both ends."""
        if self.log and num < self.size():
            values = np.geomspace(self.low, self.high, num)
            return tuple(dict.fromkeys(round(value) for value in values))
        picks = np.linspace(0, int(self.size()) - 1, min(num, int(self.size())))
        return tuple(self.low + self.step * round(i) for i in picks)

    def size(self) -> float:
        """Return the number of values."""
        return (self.high - self.low) // self.step + 1

    def when(self, **parents: Any) -> Int:
        """Return the same domain, present only when other hyper-parameters have these values."""
        return Int(
            self.low,
            self.high,
            log=self.log,
            step=self.step,
            conditions=(*self.conditions, *_conditions(parents)),
        )


def _takes_one_list(kind: type[_D]) -> type[_D]:
    """Let a class say that its options are one list if they are given one by one."""
    init = kind.__init__

    @wraps(init)
    def checked(self: _D, *options: Any, **named: Any) -> None:
        if len(options) > 1:
            given = ", ".join(map(repr, options))
            name = kind.__name__
            raise SpaceError(f"{name}({given}): give a list: {name}([{given}])")
        init(self, *options, **named)

    kind.__init__ = checked  # type: ignore[assignment]
    return kind


@_takes_one_list
@dataclass(frozen=True, slots=True)
class Choice(Domain):
    """One of the given options: numbers, strings, schedules, or further domains.

    Raises SpaceError if there is no option, or the same option twice.

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
        seen = set()
        for option in options:
            if (type(option), option) in seen:  # 1 and True are equal, and two options
                raise SpaceError(f"Choice: {option!r} is there twice; drop one")
            seen.add((type(option), option))
        object.__setattr__(self, "options", options)

    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one option."""
        return self.options[int(rng.integers(len(self.options)))]

    def levels(self, num: int) -> tuple[Any, ...]:
        """Return all options."""
        return tuple(self.options)

    def size(self) -> float:
        """Return the number of options."""
        return len(self.options)

    def when(self, **parents: Any) -> Choice:
        """Return the same domain, present only when other hyper-parameters have these values."""
        return Choice(self.options, conditions=(*self.conditions, *_conditions(parents)))


def domain_text(domain: object) -> str:
    """Return a domain, or several, as text for a message, without conditions that are empty.

    ``repr`` has them, because it is stored in databases and read back.

    >>> domain_text(Choice([8, 32]))
    'Choice(options=(8, 32))'
    """
    return repr(domain).replace(", conditions=()", "")


def values_text(domain: object) -> str:
    """Return which values a hyper-parameter can have, as the end of a sentence.

    >>> values_text(Choice([8, 32])), values_text(Float(0.0, 1.0)), values_text("adam")
    ('one of 8, 32', 'a number from 0.0 to 1.0', "'adam'")
    """
    if isinstance(domain, Choice):
        options = [domain_text(option) for option in domain.options]
        return f"one of {', '.join(options)}" if len(options) > 1 else options[0]
    if not isinstance(domain, Float | Int):
        return domain_text(domain)
    kind = "a number" if isinstance(domain, Float) else "a whole number"
    is_stepped = domain.step not in (None, 1)
    steps = f" in steps of {domain.step!r}" if is_stepped else ""
    return f"{kind} from {domain.low!r} to {domain.high!r}{steps}"


_TO_PLAIN: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
"""How objects of subclasses of numbers and strings become plain ones."""


def freeze(value: Any) -> Any:
    """Turn lists into tuples and other numbers and strings into Python's; reject all other values.

    A study that goes on reads plain values from its database, so it begins with them, too. Members
    of enums are rejected, also those that are strings: code such as ``hp.act is Act.TANH`` would
    answer otherwise for plain ones.

    Raises:
        SpaceError: The value is none of those that a hyper-parameter may have.
    """
    if isinstance(value, enum.Enum):
        name = type(value).__name__
        raise SpaceError(
            f"{value!r} is a member of an enum, which databases do not keep; give its name or its "
            f"value, such as Choice([each.name for each in {name}]), and look the member up inside "
            f"the task, as in {name}[hp.name]"
        )
    if isinstance(value, np.generic):
        value = value.item()
    for kind, plain in _TO_PLAIN.items():
        if isinstance(value, kind) and type(value) not in (kind, bool):
            value = plain(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise SpaceError(f"{value!r} is not a finite number")
    is_plain = value is None or isinstance(value, bool | int | float | str)
    # Schedules and domains. Schedules are recognised by name: this module cannot import them.
    if is_plain or isinstance(value, Domain | Amount) or hasattr(value, "segments"):
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
    """Convert NumPy scalars among the bounds to Python's; reject other types.

    Raises:
        SpaceError: A bound or a step is not a number (for ``Int``: not an integer), or ``log`` is
            not a bool.
    """
    owner = type(domain).__name__
    accepted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    for name in ("low", "high", "step"):
        value = getattr(domain, name)
        if value is None and name == "step" and kind is float:
            continue
        if isinstance(value, Amount):
            raise SpaceError(
                f"{owner}({name}={value!r}): {name} must be a plain number; list the amounts: "
                f"Choice([{value!r}, ...])"
            )
        if isinstance(value, bool) or not isinstance(value, accepted):
            wanted = "an integer" if kind is int else "a number"
            hint = "; use Float for real numbers" if isinstance(value, float) else ""
            raise SpaceError(f"{owner}({name}={value!r}): {name} must be {wanted}{hint}")
        if type(value) not in (int, float):
            plain = int(value) if isinstance(value, int | np.integer) else float(value)
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
        raise SpaceError(f"{where}: step must be positive and finite, got {domain.step!r}")
    if domain.log and domain.step not in (None, 1):
        raise SpaceError(f"{where}: log=True and step cannot be combined; drop one")


def _check_size(domain: Float | Int, where: str) -> None:
    """Raise SpaceError for bounds that floating-point arithmetic cannot handle."""
    ends = domain.low, domain.high
    if isinstance(domain, Int):
        if max(map(abs, ends)) > MAX_INT:
            raise SpaceError(
                f"{where}: bounds must be within +-2**53 ({MAX_INT:,}), because larger integers "
                "cannot be told apart in floating point; use smaller ones and scale them in "
                "your task"
            )
        return
    try:
        finite = all(math.isfinite(number) for number in (*ends, float(ends[1] - ends[0])))
    except OverflowError:  # an integer too large for a float
        finite = False
    if not finite:
        raise SpaceError(f"{where}: bounds must be finite, and so must their difference")
    if domain.step and (ends[1] - ends[0]) / domain.step > MAX_INT:
        raise SpaceError(f"{where}: step={domain.step!r} gives more than 2**53 values; raise it")


_PLAIN = frozenset({int, float, str, bool, type(None)})


def amounts_in(value: Any) -> tuple[Amount, ...]:
    """Return the amounts of steps, tokens or epochs that a value holds."""
    if type(value) in _PLAIN:  # a shortcut for the many values that hold nothing
        return ()
    if isinstance(value, Amount):
        return (value,)
    if isinstance(value, Domain):
        options = tuple(value.options) if isinstance(value, Choice) else ()
        value = (*options, *(condition.values for condition in value.conditions))
    if isinstance(value, tuple):
        return tuple(amount for item in value for amount in amounts_in(item))
    # Schedules are recognised by name: this module cannot import them.
    return tuple(value.amounts()) if hasattr(value, "amounts") else ()


def in_epochs(value: Any, size: EpochSize) -> Any:
    """Return a value with all amounts as epochs; the same object if there are none.

    Raises:
        UsageError: The size of an epoch is unknown in the unit of an amount.
    """
    if not amounts_in(value):
        return value
    if isinstance(value, Amount):
        return size.in_epochs(value)
    if isinstance(value, tuple):
        return tuple(in_epochs(item, size) for item in value)
    if not isinstance(value, Float | Int | Choice):
        return value.in_epochs(size)
    conditions = tuple(
        Condition(each.name, in_epochs(each.values, size)) for each in value.conditions
    )
    if isinstance(value, Choice):
        return Choice(in_epochs(tuple(value.options), size), conditions=conditions)
    return replace(value, conditions=conditions)
