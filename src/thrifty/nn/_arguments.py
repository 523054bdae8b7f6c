"""Checks of user input."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from thrifty.core import LayerError


def check_integers(least: int, **options: Any) -> None:
    """Check that all options are integers of at least ``least``.

    Raises:
        LayerError: an option is not an integer, or too small.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise LayerError(f"{name}={value!r}; give an integer of at least {least}")


def check_rate(p: Any) -> float:
    """Return the probability that a unit is dropped, as a float.

    Raises:
        LayerError: it is not a probability, or no unit would be left.
    """
    is_number = isinstance(p, Real) and not isinstance(p, bool)
    if not (is_number and 0.0 <= p < 1.0):
        raise LayerError(f"p={p!r}; give a probability from 0 up to, but not, 1")
    return float(p)
