"""A cache of loaded data sets: those that trials use, plus the few used last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar
from weakref import ref

from ._data import Source


NUM_RECENT = 2
"""How many of the data sets used last stay loaded for the next trial, even while unused."""

Key = TypeVar("Key")


_NUMBERS = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known(Generic[Key]):
    key: Key
    source: Callable[[], Source | None]
    number: int


class AliveSources(Generic[Key]):
    """Pairs of a key and a source; a pair lasts as long as its source is alive.

    This object keeps only the sources used last alive. The others live as long as their trials do.
    """

    def __init__(self) -> None:
        self._known: list[_Known[Key]] = []
        self._recent: list[Source] = []

    def __iter__(self) -> Iterator[tuple[Key, Source]]:
        self._known = [known for known in self._known if known.source() is not None]
        for known in tuple(self._known):
            source = known.source()
            if source is not None:
                yield known.key, source

    def add(self, key: Key, source: Source) -> None:
        """Record a source that was just loaded."""
        self._known.append(_Known(key=key, source=self._weakly(source), number=next(_NUMBERS)))
        self.use(source)

    def number_of(self, source: Source) -> int:
        """Return a number unique to a source in this process; unlike ``id``, it is never reused."""
        return next(known.number for known in self._known if known.source() is source)

    def use(self, source: Source) -> None:
        """Mark a source as the one used last, because a trial has begun with it."""
        others = [other for other in self._recent if other is not source]
        self._recent = [source, *others][:NUM_RECENT]

    def _weakly(self, source: Source) -> Callable[[], Source | None]:
        try:
            return ref(source)
        except TypeError:  # it allows no weak references: look it up among the recent sources
            number = id(source)
            return lambda: next((s for s in self._recent if id(s) == number), None)
