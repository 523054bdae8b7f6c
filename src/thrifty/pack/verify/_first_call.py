"""What code keeps when it runs first, and whether that depends on the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from thrifty.core import TaskError
from thrifty.pack._state import seeded_otherwise
from thrifty.pack.identity import content_digest

from ._keeper import Keeper, caches_in, kept_places, results_of


Made = TypeVar("Made")


class MadeOnce:
    """What code keeps when it runs first: in variables, in attributes, and in caches.

    A value that is drawn from a seeded stream, and kept, depends on the trial that made it. Then
    the streams end elsewhere if a trial is made a second time with the same seed, because nothing
    is drawn for the value that was kept. That is only a suspicion: code that seeds the streams
    itself also leaves them elsewhere. ``first_made`` runs the code as if for the first time, with
    this seed and with another: what is kept must be the same.

    Example::

        kept = MadeOnce({"task": task})
        task.model(hp)
        kept.take_changed()  # ["CACHE", "projection(...)"]

    Args:
        roots: Code and objects by name, such as a task.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._keeper = self._before = Keeper(kept_places(roots), containers_only=True)
        self._num_calls = self._count_calls()
        self._filled: list[Any] = []
        self.last_changed: list[str] = []
        """The names of the last changes that ``take_changed`` has found."""

    def take_changed(self) -> list[str]:
        """Return the names of what has been made since the last call."""
        changed = self._changed()
        if changed:
            self.last_changed = changed
            self._before, self._filled = self._keeper, self._filled_caches()
            self._keeper = self._keeper.grown()
            self._num_calls = self._count_calls()
        return changed

    def undo(self) -> None:
        """Undo the changes that ``take_changed`` found last; caches are emptied."""
        self._before.put_back()
        for cache in self._filled:
            cache.cache_clear()

    def has_changed(self) -> bool:
        """Return whether anything has been made since the last call of ``take_changed``."""
        return bool(self._changed())

    def first_made(self, make: Callable[[], Made]) -> FirstMade[Made]:
        """Run code as if for the first time, and find out what it keeps that depends on the seed.

        Tables and caches are as they were before the changes that ``take_changed`` found last, and
        are put back afterwards.

        Args:
            make: Runs the code. It seeds the streams with ``seed_everything``.
        """
        with seeded_otherwise():
            otherwise, other, _ = self._run(make)
        made, same, is_known = self._run(make)
        differing = {name for name, digests in same.items() if other.get(name) != digests}
        if differing:  # what also differs for the same seed, such as a time, is not drawn
            _, again, _ = self._run(make)
            differing = {name for name in differing if again.get(name) == same[name]}
        return FirstMade(made=made, otherwise=otherwise, drawn=sorted(differing), is_known=is_known)

    def _run(self, make: Callable[[], Made]) -> tuple[Made, dict[str, Any], bool]:
        """Run code; return its result, digests of what it keeps, and whether all have one."""
        with self._as_before():
            made = make()
            out: dict[str, Any] = {
                place.name: digest_or_none(place.get())
                for place in self._before.places_changed()
                if not caches_in([place])
            }
            for cache in self._before.caches:
                results = results_of(cache)
                if results and cache.cache_info().misses:
                    found = [digest_or_none(result) for result in results]
                    out[cached_name(cache)] = None if None in found else sorted(map(str, found))
        known = {name: digests for name, digests in out.items() if digests is not None}
        return made, known, bool(out) and len(known) == len(out)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        now = self._before.grown()
        self._before.put_back()
        self._before.empty_caches({}, only=self._filled)
        try:
            yield
        finally:
            now.put_back()

    def _changed(self) -> list[str]:
        return self._keeper.changed() + [cached_name(each) for each in self._filled_caches()]

    def _filled_caches(self) -> list[Any]:
        known = self._num_calls
        return [
            each for each in self._keeper.caches if each.cache_info().misses != known.get(each, 0)
        ]

    def _count_calls(self) -> dict[Any, int]:
        """Return how often each cached function has had to compute its result."""
        return {each: each.cache_info().misses for each in self._keeper.caches}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstMade(Generic[Made]):
    """The findings of ``MadeOnce.first_made``.

    Attributes:
        made: What the code has returned.
        otherwise: What it has returned with another seed.
        drawn: The names of what it keeps that depends on the seed.
        is_known: Whether it keeps something, all of which could be compared.
    """

    made: Made
    otherwise: Made
    drawn: list[str]
    is_known: bool


def cached_name(cache: Any) -> str:
    """Return the name of a function under ``functools.lru_cache``, for messages."""
    return f"{cache.__wrapped__.__qualname__}(...)"


def digest_or_none(value: Any) -> str | None:
    """Return the digest of a value; None if something in it has no content."""
    try:
        return content_digest(value)
    except TaskError:
        return None
