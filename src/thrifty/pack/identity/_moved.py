"""Values that a task itself changes while it runs; the first value of each defines the task.

A task may fill a cache or count its epochs, in a global or an attribute. In this process it then
differs from what it was when it was imported, but it is still the same task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._place import Place


Key = tuple[int, Any]
Texts = Mapping[Key, tuple[Place, str]]
"""Places with their values as text."""


@dataclass(frozen=True, slots=True)
class _Move:
    holder: Callable[[], Any]
    before: str | None
    """The first value; None if the place did not exist."""
    after: str


class Moves:
    """The places whose values tasks have changed in this process."""

    def __init__(self) -> None:
        self._moves: dict[Key, _Move] = {}

    def note(self, before: Texts, after: Texts) -> None:
        """Record which values have changed while the task ran."""
        for key, (place, text) in after.items():
            was = before.get(key)
            if was is not None and was[1] == text:
                continue
            known = self._find(place)
            first = None if was is None else was[1]
            if known is not None and first == known.after:
                first = known.before
            self._moves[key] = _Move(_reference(place.holder), first, text)

    def known(self, place: Place) -> bool:
        """Return whether a task has ever changed the value of a place."""
        return self._find(place) is not None

    def first(self, place: Place, text: str) -> str | None:
        """Return what a place held before the task ran, if it still holds what the run left.

        A value that other code has put there since is returned as it is. None means that the place
        did not exist.
        """
        move = self._find(place)
        return move.before if move is not None and move.after == text else text

    def _find(self, place: Place) -> _Move | None:
        move = self._moves.get((id(place.holder), place.key))
        return move if move is not None and move.holder() is place.holder else None


def _reference(holder: Any) -> Callable[[], Any]:
    """Return a weak reference if possible, so as not to keep a task and its data alive."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


MOVES = Moves()
