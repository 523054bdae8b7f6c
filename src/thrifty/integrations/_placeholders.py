"""Numbers that tell whether anything was done with them, besides keeping them."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from thrifty.pack.identity._own import is_own_file


class Placeholder:
    """Stands for a number, and records whether code does more with it than keep it.

    Any operation on it (arithmetic, a comparison, a conversion, a look at an attribute, printing)
    gives what the number gives, and is recorded while it is ``watched``. So code that ran without
    one does the same for every number of this type: it has put the number somewhere, and has not
    looked at it. ``isinstance`` answers as for the number. ``type`` cannot be kept from telling
    that this is something else, so a function of the user that may call it counts as looking.

    >>> rate = placeholder(0.1)
    >>> with watched([rate]) as is_kept:
    ...     kept = {"lr": rate}
    >>> is_kept(), kept["lr"] * 2
    (True, 0.2)
    >>> with watched([rate]) as is_kept:
    ...     small = rate < 0.5
    >>> is_kept()
    False
    """

    __slots__ = ("_is_used", "_is_watched", "_value")

    def __init__(self, value: float) -> None:
        _put(self, _value=value, _is_watched=False, _is_used=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(_get(self, "_value"))

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
"""Attributes that tell nothing of the value."""

_get: Callable[[Any, str], Any] = object.__getattribute__


def _put(number: Placeholder, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(number, name, value)


def _looked_at(number: Placeholder) -> Any:
    """Return the number for an operation on it, and record that there was one."""
    if _get(number, "_is_watched"):
        _put(number, _is_used=True)
    return _get(number, "_value")


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Placeholder, *args: Any) -> Any:
        value = _looked_at(self)
        return getattr(value, name)(*map(_operand, args))

    operate.__name__ = name
    return operate


def _operand(value: Any) -> Any:
    return _looked_at(value) if issubclass(type(value), Placeholder) else value


_OF_TYPES = frozenset({
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__getnewargs__"),
    *("__getformat__", "__setformat__"),
})
"""Special methods that are no operation on a number, or that are defined above."""


def _kind(number: type) -> type[Placeholder]:
    """Return a class with the operations of a type of numbers, and no others."""
    names = [n for n in dir(number) if n.startswith("__") and n not in _OF_TYPES]
    return type(
        f"{number.__name__.capitalize()}Placeholder",
        (Placeholder,),
        {"__slots__": (), **{name: _operation(name) for name in names}},
    )


_KINDS = {number: _kind(number) for number in (int, float)}


def placeholder(number: float) -> Placeholder:
    """Return a placeholder for an integer or a float.

    >>> placeholder(3) + 1
    4
    """
    return _KINDS[type(number)](number)


@contextlib.contextmanager
def watched(numbers: Collection[Placeholder]) -> Iterator[Callable[[], bool]]:
    """Record operations on placeholders, and yield a function that says whether there was none.

    A function of the user's own that names ``type``, or that assigns to a global variable, counts
    as one, if it is called meanwhile. So does a profiler, since there can be only one.
    """
    asks = sys.getprofile() is not None

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal asks
        if event == "call" and _is_doubtful(frame.f_code):
            asks = True

    _put_all(numbers, _is_watched=True, _is_used=False)
    if numbers and not asks:
        sys.setprofile(note)
    try:
        yield lambda: not numbers or not (asks or any(_get(n, "_is_used") for n in numbers))
    finally:
        if sys.getprofile() is note:
            sys.setprofile(None)
        _put_all(numbers, _is_watched=False)


def _put_all(numbers: Collection[Placeholder], **attributes: Any) -> None:
    for each in numbers:
        _put(each, **attributes)


@lru_cache(maxsize=4096)
def _is_doubtful(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<frozen") or not is_own_file(file):  # Python's own, or a library's
        return False
    return "type" in code.co_names or any(
        each.opname == "STORE_GLOBAL" for each in dis.get_instructions(code)
    )
