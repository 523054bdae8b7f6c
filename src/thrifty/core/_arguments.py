"""Checks of arguments that several packages share."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ._errors import ThriftyError


def check_integers(error: type[ThriftyError], least: int, /, **options: Any) -> None:
    """Check that all options are integers of at least ``least``.

    Args:
        error: The class of the error.
        least: The smallest value allowed.
        options: The options by name.

    Raises:
        ThriftyError: An option is not an integer, or too small; of the class ``error``.

    >>> check_integers(ThriftyError, 1, batch_size=8)
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise error(f"{name}={value!r}; give an integer of at least {least}")
