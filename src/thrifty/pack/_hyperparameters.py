"""The hyper-parameters of one trial at one moment, as the user's code reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thrifty.core import TaskError


class HyperParameters(Mapping[str, Any]):
    """Read-only values by name: ``hp.width`` or ``hp["width"]``; ``hp.get("x", 0)`` for optional ones.

    It remembers which names were read, so that what depends on them can be told from what does not.

    >>> hp = HyperParameters({"width": 64, "lr": 0.1})
    >>> hp.width, sorted(hp.names_read)
    (64, ['width'])
    """

    __slots__ = ("_values", "names_read")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self._values) or "none"
            raise TaskError(
                f"the task reads hyper-parameter {name!r}, which the search space does not have "
                f"(it has: {known}); add it to the space, or read it with hp.get({name!r}, default)"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"HyperParameters({self._values!r})"

    def subset(self, names: set[str]) -> dict[str, Any]:
        """The values of some names, those that are there, without noting a read."""
        return {name: self._values.get(name) for name in sorted(names)}
