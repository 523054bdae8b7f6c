"""Values that tell whether anything was done with them, besides keeping them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class UsedError(Exception):
    """Something was done with a placeholder while it was watched."""


class Placeholder:
    """Stands for a number while code runs that may only keep it.

    Any operation on it (arithmetic, a comparison, a conversion, a look at an attribute, printing)
    is recorded, and fails. So code that ran to its end without one does the same for every number
    of this type: it has put the number somewhere, and has not looked at it. ``isinstance`` answers
    as for the number; ``type`` cannot be kept from telling that this is something else.

    Outside of ``watched``, a placeholder that is left somewhere acts as its number.

    >>> rate = Placeholder(0.1)
    >>> with watched(rate) as is_kept:
    ...     kept = {"lr": rate}
    >>> is_kept(), kept["lr"] * 2
    (True, 0.2)
    >>> with watched(rate) as is_kept, contextlib.suppress(UsedError):
    ...     small = rate < 0.5
    >>> is_kept()
    False
    """

    __slots__ = ("_is_used", "_is_watched", "_value")

    def __init__(self, value: float) -> None:
        _put(self, _value=value, _is_watched=False, _is_used=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(_value(self))

    def __copy__(self) -> Placeholder:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self  # as a number does

    def __getattribute__(self, name: str) -> Any:
        if name in _KEPT:
            return object.__getattribute__(self, name)
        return getattr(_looked_at(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_looked_at(self), name, value)  # fails as it does for a number


_KEPT = frozenset({"__class__", "__copy__", "__deepcopy__"})
"""Attributes that a number has, and that tell nothing of its value."""

_get: Callable[[Any, str], Any] = object.__getattribute__


def _put(placeholder: Placeholder, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(placeholder, name, value)


def _value(placeholder: Placeholder) -> Any:
    return _get(placeholder, "_value")


def _looked_at(placeholder: Placeholder) -> Any:
    """Return the number for an operation on it.

    Raises:
        UsedError: The placeholder is watched.
    """
    if _get(placeholder, "_is_watched"):
        _put(placeholder, _is_used=True)
        raise UsedError
    return _value(placeholder)


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Placeholder, *args: Any) -> Any:
        value = _looked_at(self)
        return getattr(value, name)(*map(value_of, args))

    operate.__name__ = name
    return operate


_OF_TYPES = frozenset({
    *(
        "__class__",
        "__new__",
        "__init__",
        "__init_subclass__",
        "__subclasshook__",
        "__getattribute__",
    ),
    *("__setattr__", "__delattr__", "__doc__", "__getnewargs__", "__getformat__", "__setformat__"),
})
"""Special methods that are no operation on a number, or that are defined above."""

for _name in {
    *dir(int),
    *dir(float),
    "__matmul__",
    "__len__",
    "__iter__",
    "__getitem__",
    "__call__",
}:
    if _name.startswith("__") and _name not in _OF_TYPES:
        setattr(Placeholder, _name, _operation(_name))


def value_of(value: Any) -> Any:
    """Return the number that a placeholder stands for, and anything else as it is.

    >>> value_of(Placeholder(3)), value_of("a")
    (3, 'a')
    """
    return _value(value) if type(value) is Placeholder else value


@contextlib.contextmanager
def watched(*placeholders: Placeholder) -> Iterator[Callable[[], bool]]:
    """Make operations on placeholders fail, and yield a function that says whether none was tried.

    That also counts operations whose error has been caught by the code that tried them.
    """
    for each in placeholders:
        _put(each, _is_watched=True, _is_used=False)
    try:
        yield lambda: not any(_get(each, "_is_used") for each in placeholders)
    finally:
        for each in placeholders:
            _put(each, _is_watched=False)
