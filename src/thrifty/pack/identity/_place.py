"""Places that hold values, and those whose value a run has moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""The value of a place that holds nothing now: a name that is not defined yet, an empty cell."""

PlaceKind = Literal["global", "closure", "default", "class attribute", "attribute", "item", "slot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A location whose value may change and that code reads.

    Attributes:
        name: A readable name, such as ``"helpers.SCALE"`` or ``"loss.<closure>.weight"``.
        kind: The kind of location; an ``"item"`` is a keyword of a ``functools.partial``, or a
            variable of the environment.
        holder: The object that holds the value: a module's namespace, a cell, a function, a class,
            an instance, a mapping.
        key: The name of the value in its holder; an index for a default.
        own: False for an attribute of an object whose class comes from an installed package
            (``torch.nn.Module`` excepted).
    """

    name: str
    kind: PlaceKind
    holder: Any
    key: Any
    own: bool = True

    def get(self) -> Any:
        """Return the current value, or ``MISSING``. Runs none of the user's code."""
        if self.kind == "closure":
            try:
                return self.holder.cell_contents
            except ValueError:
                return MISSING
        if self.kind == "default":
            return self._default()
        if self.kind == "slot":
            try:
                return _descriptor(self.holder, self.key).__get__(self.holder)
            except AttributeError:
                return MISSING
        names: Mapping[Any, Any] = (
            self.holder if self.kind in ("global", "item") else _namespace(self.holder)
        )
        return names.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Set the value of the place; ``MISSING`` removes it."""
        if self.kind == "closure":
            _set_cell(self.holder, value)
        elif self.kind == "default":
            self._set_default(value)
        elif self.kind == "slot":
            descriptor = _descriptor(self.holder, self.key)
            if value is not MISSING:
                descriptor.__set__(self.holder, value)
            elif self.get() is not MISSING:
                descriptor.__delete__(self.holder)
        elif self.kind == "class attribute":
            if value is not MISSING:
                type.__setattr__(self.holder, self.key, value)
            elif self.key in vars(self.holder):
                type.__delattr__(self.holder, self.key)
        else:
            is_mapping = self.kind == "item" or isinstance(self.holder, dict)
            names = self.holder if is_mapping else _namespace(self.holder)
            if value is MISSING:
                names.pop(self.key, None)
            else:
                names[self.key] = value

    def _default(self) -> Any:
        function: FunctionType = self.holder
        if isinstance(self.key, int):
            values = function.__defaults__ or ()
            return values[self.key] if self.key < len(values) else MISSING
        return (function.__kwdefaults__ or {}).get(self.key, MISSING)

    def _set_default(self, value: Any) -> None:
        function: FunctionType = self.holder
        if isinstance(self.key, int):
            values = list(function.__defaults__ or ())
            values[self.key] = value
            function.__defaults__ = tuple(values)
        else:
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), self.key: value}


def _namespace(holder: Any) -> Any:
    """Return the dict of an instance or class, past any ``__getattr__`` or property of the user."""
    return (
        type.__dict__["__dict__"].__get__(holder) if isinstance(holder, type) else vars_of(holder)
    )


def vars_of(instance: Any) -> dict[str, Any]:
    """Return the attributes that an instance holds in its dict; empty if it has none."""
    try:
        found = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases."""
    return [
        name
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]


def _descriptor(instance: Any, name: str) -> MemberDescriptorType:
    for base in type(instance).__mro__:
        member = vars(base).get(name)
        if isinstance(member, MemberDescriptorType):
            return member
    raise AttributeError(name)


def _set_cell(cell: CellType, value: Any) -> None:
    if value is not MISSING:
        cell.cell_contents = value
        return
    try:
        del cell.cell_contents
    except ValueError:
        return


Key = tuple[int, Any]
Reference = Callable[[], Any]
"""Returns an object, or None if it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceText:
    """A place, its value as text, and the functions and classes that the value led to.

    The text is None for a function or class that counts under its own name.
    """

    place: Place
    text: str | None
    code: tuple[Reference, ...]


Texts = Mapping[Key, PlaceText]


@dataclass(frozen=True, slots=True)
class _Move:
    holder: Reference
    before: str | None
    """The first value; None if the place did not exist, or counted under another name."""
    after: str | None
    code: tuple[Reference, ...]
    """The functions and classes that the first value led to."""
    made_by: Code
    """The code of the task that has changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What a task's code is, by name.

    Attributes:
        home: The module whose names are given without it.
        digests: Digests of functions, classes and values of globals.
    """

    home: str
    digests: Mapping[str, str]

    def is_edited(self, now: Code) -> bool:
        """Return whether a part of the code that both have has changed.

        Names of other modules may stand for something else.
        """
        if self.home != now.home:
            return False
        return any(now.digests.get(name, text) != text for name, text in self.digests.items())


class Moves:
    """The places whose values tasks have changed in this process."""

    def __init__(self) -> None:
        self._moves: dict[Key, _Move] = {}
        self._filled: WeakKeyDictionary[Any, Code] = WeakKeyDictionary()
        """The code that has filled the caches of functions."""

    def note(self, before: Texts, after: Texts, *, made_by: Code) -> None:
        """Record which values have changed while the task ran."""
        for key, now in after.items():
            was = before.get(key)
            if was is not None and was.text == now.text:
                continue
            known = self._find(now.place)
            first, code = (None, ()) if was is None else (was.text, was.code)
            if known is not None and first == known.after:
                first, code = known.before, known.code
            self._moves[key] = _Move(referred(now.place.holder), first, now.text, code, made_by)

    def known(self, place: Place) -> bool:
        """Return whether a task has ever changed the value of a place."""
        return self._find(place) is not None

    def first(self, place: Place, text: str) -> str | None:
        """Return what a place held before the task ran, if it still holds what the run left.

        A value that other code has put there since is returned as it is. None means that the place
        did not exist, or counted under another name.
        """
        move = self._find(place)
        return move.before if move is not None and move.after == text else text

    def note_filled(self, cached: Iterable[Any], *, made_by: Code) -> None:
        """Record which code has filled the caches of functions, where that is not known yet."""
        for each in cached:
            if not each.cache_info().currsize:
                self._filled.pop(each, None)
            else:
                self._filled.setdefault(each, made_by)

    def is_filled_by_earlier_code(self, cached: Any, now: Code) -> bool:
        """Return whether the cache of a function has results of code that was edited since."""
        made_by = self._filled.get(cached) if cached.cache_info().currsize else None
        return made_by is not None and made_by.is_edited(now)

    def is_of_earlier_code(self, place: Place, now: Code) -> bool:
        """Return whether a task has changed a place whose code was edited since."""
        move = self._find(place)
        return move is not None and move.made_by.is_edited(now)

    def code(self, place: Place) -> list[Any]:
        """Return the functions and classes that the first value of a place led to."""
        move = self._find(place)
        found = [] if move is None else [each() for each in move.code]
        return [each for each in found if each is not None]

    def _find(self, place: Place) -> _Move | None:
        move = self._moves.get((id(place.holder), place.key))
        return move if move is not None and move.holder() is place.holder else None


def referred(value: Any) -> Reference:
    """Return a weak reference if possible, so as not to keep a task and its data alive.

    Functions are kept: nothing else may hold one that training has replaced.
    """
    if isinstance(value, FunctionType):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


MOVES = Moves()
