"""Names that a hyper-parameter cannot have."""

from __future__ import annotations

from collections.abc import Iterable

from ._errors import SpaceError


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
