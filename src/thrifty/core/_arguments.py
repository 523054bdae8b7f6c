"""Checks of arguments and names that several packages share."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from ._errors import SpaceError, ThriftyError


RESERVED_NAMES = frozenset({"get", "items", "keys", "names_read", "values"})
"""Methods of ``HyperParameters``; ``hp.values`` is always the method, never a value."""


def check_hyperparameter_names(names: Iterable[str]) -> None:
    """Reject names that a task could not read as attributes.

    >>> check_hyperparameter_names(["lr", "width"])

    Raises:
        SpaceError: A hyper-parameter is named like a method of ``HyperParameters``.
    """
    if RESERVED_NAMES.isdisjoint(names):
        return
    name = next(name for name in names if name in RESERVED_NAMES)
    raise SpaceError(
        f"a hyper-parameter cannot be called {name!r}: hp.{name} is a method of all "
        f"hyper-parameters; choose another name, such as {name}_"
    )


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
