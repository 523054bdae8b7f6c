"""Amounts of training with a unit (steps, tokens, epochs), and how they become epochs.

Inside thrifty, time is counted in epochs. An amount is turned into epochs before anything else sees
it, by the ``EpochSize`` of a task. Amounts are exact: they are fractions until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import total_ordering
from math import floor, gcd
from typing import Any, Literal, Self, get_args

import numpy as np

from thrifty.core import UsageError


Unit = Literal["steps", "tokens", "epochs"]
UNITS: tuple[Unit, ...] = get_args(Unit)


@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Amount:
    """An amount of training, such as 5,000 steps; made by ``steps``, ``tokens`` and ``epochs``.

    It may stand wherever epochs are given: in schedules, algorithms, ``StopWhen``, ``schedule_for``
    and ``cooldowns``. Amounts of one unit are compared, added and subtracted, and an amount may be
    multiplied by a number. All results are exact; 0.2 means one fifth.

    Raises:
        UsageError: The number is negative or not finite, a number of steps or tokens is not whole,
            or the units differ.

    >>> total = steps(5_000)
    >>> total * 0.2, total - steps(500), total > steps(500)
    (steps(1_000), steps(4_500), True)
    """

    number: Fraction
    unit: Unit

    def __post_init__(self) -> None:
        exact = _exact(self.number)
        if exact is None or exact < 0:
            raise UsageError(
                f"{self.unit}({self.number!r}): give a number of {self.unit}, 0 or more"
            )
        if self.unit != "epochs" and exact.denominator != 1:
            raise UsageError(
                f"{self.unit}({self.number!r}): a number of {self.unit} must be whole; the nearest "
                f"are {floor(exact):_} and {floor(exact) + 1:_}"
            )
        object.__setattr__(self, "number", exact)

    def __repr__(self) -> str:
        return f"{self.unit}({_written(self.number)})"

    def __bool__(self) -> bool:
        return self.number != 0

    def __lt__(self, other: object) -> bool:
        found = self._like(other)
        return NotImplemented if found is None else self.number < found

    def __add__(self, other: object) -> Amount:
        found = self._like(other)
        return NotImplemented if found is None else Amount(self.number + found, self.unit)

    __radd__ = __add__

    def __sub__(self, other: object) -> Amount:
        found = self._like(other)
        return NotImplemented if found is None else Amount(self.number - found, self.unit)

    def __mul__(self, factor: object) -> Amount:
        exact = _exact(factor)
        return NotImplemented if exact is None else Amount(self.number * exact, self.unit)

    __rmul__ = __mul__

    def _like(self, other: object) -> Fraction | None:
        """Return the number of another amount of this unit; 0 is an amount of every unit.

        Raises:
            UsageError: The other amount has another unit, or is a plain number.
        """
        if isinstance(other, Amount):
            if other.unit == self.unit:
                return other.number
            raise UsageError(
                f"{self!r} and {other!r} have different units and are only comparable in a study; "
                "write both in one unit"
            )
        exact = _exact(other)
        if exact is None or exact == 0:
            return exact
        raise UsageError(
            f"{self!r} and {other!r}: the plain number counts epochs; write both in one unit, such "
            f"as {self.unit}(...)"
        )


def steps(number: float) -> Any:
    """Return a number of optimizer steps, to be given wherever epochs are.

    The task says how many steps an epoch has: ``steps_per_epoch``, or else the number of its
    batches.

    Raises:
        UsageError: The number is negative or not whole.

    >>> steps(5_000)
    steps(5_000)
    """
    return Amount(number, "steps")  # type: ignore[arg-type]  # the amount makes it exact


def tokens(number: float) -> Any:
    """Return a number of tokens, to be given wherever epochs are.

    A step has ``batch_size`` samples, and a sample ``tokens_per_sample`` tokens, which the task or
    its data say.

    Raises:
        UsageError: The number is negative or not whole.

    >>> tokens(2e9)
    tokens(2_000_000_000)
    """
    return Amount(number, "tokens")  # type: ignore[arg-type]  # the amount makes it exact


def epochs(number: float) -> Any:
    """Return a number of epochs, to be given where amounts of other units are.

    Raises:
        UsageError: The number is negative.

    >>> epochs(3), epochs(0.5)
    (epochs(3), epochs(0.5))
    """
    return Amount(number, "epochs")  # type: ignore[arg-type]  # the amount makes it exact


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """The unit in which a study shows how long it trains, and how much of it an epoch is.

    >>> unit = TimeUnit(name="steps", per_epoch=500)
    >>> unit.text(10), unit.count(2.5), TimeUnit().text(1)
    ('5,000 steps (10 epochs)', 1250, '1 epoch')
    """

    name: Unit = "epochs"
    per_epoch: int = 1

    @property
    def is_epochs(self) -> bool:
        """Whether epochs are shown as epochs."""
        return self.name == "epochs"

    def count(self, epochs: float) -> float:
        """Return a number of epochs in this unit: whole steps or tokens, or plain epochs."""
        if self.is_epochs:
            return int(epochs) if epochs == int(epochs) else epochs
        return round(Fraction(epochs) * self.per_epoch)

    def amount(self, epochs: float) -> Amount:
        """Return a number of epochs as an amount of this unit."""
        return Amount(self.count(epochs), self.name)  # type: ignore[arg-type]  # made exact

    def short(self, epochs: float) -> str:
        """Return a number of epochs in this unit alone, such as ``5,000 steps``."""
        number = self.count(epochs)
        return f"{number:,} {self.name[:-1] if number == 1 else self.name}"

    def text(self, epochs: float) -> str:
        """Return a number of epochs in this unit and in epochs."""
        if self.is_epochs:
            return self.short(epochs)
        return f"{self.short(epochs)} ({TimeUnit().short(epochs)})"

    def place(self, epochs: float) -> str:
        """Return a position in training, such as ``epoch 10`` or ``step 5,000 (epoch 10)``."""
        epoch = f"epoch {TimeUnit().count(epochs):,}"
        return epoch if self.is_epochs else f"{self.name[:-1]} {self.count(epochs):,} ({epoch})"

    def places(self, first: int, last: int) -> str:
        """Return a range of positions, such as ``steps 500 to 5,000 (epochs 1 to 10)``."""
        both = f"epochs {first:,} to {last:,}"
        if self.is_epochs:
            return both
        return f"{self.name} {self.count(first):,} to {self.count(last):,} ({both})"

    def fact(self, epochs: int) -> tuple[str, str]:
        """Return a number of epochs as a row of a table: ``("steps", "5,000 (10 epochs)")``."""
        if self.is_epochs:
            return "epochs", str(epochs)
        return self.name, f"{self.count(epochs):,} ({TimeUnit().short(epochs)})"

    @property
    def definition(self) -> str:
        """How much of the unit an epoch is, in one line."""
        return f"an epoch is {self.short(1)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` turns back into the unit."""
        return {"name": self.name, "per_epoch": self.per_epoch}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Return the unit that ``to_json`` wrote; epochs if there is none."""
        if not data or data.get("name") not in UNITS:
            return cls()
        return cls(name=data["name"], per_epoch=int(data["per_epoch"]))


EPOCHS = TimeUnit()
"""The unit of a study that does not name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSize:
    """How many steps and tokens an epoch has, which turns amounts into epochs.

    Args:
        steps: Optimizer steps of an epoch (None: unknown).
        tokens: Tokens of an epoch (None: unknown).
        why_no_steps: Why the steps are unknown, for the error.
        why_no_tokens: Why the tokens are unknown, for the error.

    >>> size = EpochSize(steps=500)
    >>> size.in_epochs(steps(1_250)), size.in_epochs(steps(1_000))
    (2.5, 2)
    """

    steps: int | None = None
    tokens: int | None = None
    why_no_steps: str = "set steps_per_epoch on the task"
    why_no_tokens: str = "set steps_per_epoch, batch_size and tokens_per_sample on the task"

    def unit(self, name: Unit) -> TimeUnit:
        """Return a unit with how much of it an epoch has.

        Raises:
            UsageError: That is unknown; the message says what to do.
        """
        known = {"steps": self.steps, "tokens": self.tokens, "epochs": 1}[name]
        if known is None:
            why = self.why_no_steps if name == "steps" else self.why_no_tokens
            raise UsageError(f"the number of {name} of an epoch is unknown: {why}")
        return TimeUnit(name=name, per_epoch=known)

    def fraction(self, amount: Amount) -> Fraction:
        """Return an amount as an exact number of epochs.

        Raises:
            UsageError: The task does not say how much of the unit an epoch has.
        """
        return amount.number / self.unit(amount.unit).per_epoch

    def in_epochs(self, amount: Amount) -> float:
        """Return an amount as a number of epochs: an int if it is whole, else the nearest float."""
        return _plain(self.fraction(amount))

    def whole(self, amount: Amount, *, what: str) -> int:
        """Return an amount as a whole number of epochs.

        Raises:
            UsageError: It is not whole; the message names the two nearest amounts that are.
        """
        exact = self.fraction(amount)
        if exact.denominator == 1 and exact >= 1:
            return int(exact)
        unit = self.unit(amount.unit)
        below, above = floor(exact), floor(exact) + 1
        fits = " or ".join(f"{unit.amount(n)!r}" for n in (below, above) if n >= 1)
        better = _divisor(amount, unit)
        hint = f", or choose {better}" if better else ""
        size = "" if unit.is_epochs else f" of {unit.per_epoch:,} {unit.name}"
        raise UsageError(f"{what} {amount!r} is {_decimal(exact)} epochs{size}; use {fits}{hint}")


def _divisor(amount: Amount, unit: TimeUnit) -> str:
    """Return the largest smaller epoch that divides both an epoch and an amount, as a setting."""
    if unit.name != "steps" or not amount:
        return ""
    per_epoch = gcd(unit.per_epoch, int(amount.number))
    return f"steps_per_epoch={per_epoch}"


def _exact(value: object) -> Fraction | None:
    """Return a finite number exactly as written, so 0.1 is one tenth; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        return None
    try:
        return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    except ValueError:  # an infinity, or not a number
        return None


def _plain(exact: Fraction) -> float:
    return int(exact) if exact.denominator == 1 else float(exact)


def _written(exact: Fraction) -> str:
    if exact.denominator == 1:
        return f"{int(exact):_}"
    near = float(exact)
    return repr(near) if _exact(near) == exact else repr(exact)


def _decimal(exact: Fraction) -> str:
    return f"{int(exact):,}" if exact.denominator == 1 else f"{float(exact):,.6g}"
