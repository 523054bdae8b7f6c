"""The variables that the trials of a process share, as they were before the first trial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.pack.identity import Place
from thrifty.pack.verify import Keeper, cached_places


@dataclass(frozen=True, slots=True)
class SavedValues:
    """The values of shared variables at one moment.

    Attributes:
        keepers: Copies of the values, one for each keeper of the variables.
    """

    keepers: Sequence[Keeper]

    def put_back(self) -> None:
        """Set all variables to these values."""
        for keeper in self.keepers:
            keeper.put_back()


class SharedVariables:
    """The variables that the trials of a process share, with their first values.

    They are global variables, attributes of classes, closures and the like, and the results that
    cached functions keep.

    Args:
        places: Where the variables are. Their values now are the first ones.

    Attributes:
        num_calls: How often cached functions had been called for a result that they did not have,
            when ``changed`` was called last.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.num_calls = 0
        self._keepers: list[Keeper] = []
        self._results: list[Keeper] = []
        """Those keepers that save what cached functions keep."""
        self.keep(places)

    @property
    def places(self) -> list[Place]:
        """Where the variables are."""
        return [place for keeper in self._keepers for place in keeper.places]

    @property
    def caches(self) -> list[Any]:
        """The cached functions that the code reads."""
        caches = {id(c): c for keeper in self._keepers for c in keeper.caches}
        return list(caches.values())

    def keep(self, places: Iterable[Place]) -> None:
        """Add those places that are not saved yet, with their values now."""
        known = set().union(*(keeper.keys for keeper in self._keepers))
        new = [place for place in places if (id(place.holder), place.key) not in known]
        if new:
            self._keepers.append(Keeper(new))

    def changed(self) -> frozenset[str]:
        """Return the names of the variables that do not have their first values.

        A result that a cached function has kept since is saved as it is now.
        """
        caches = self.caches
        num_calls = sum(cache.cache_info().misses for cache in caches)
        if num_calls != self.num_calls:
            self.num_calls = num_calls
            before = len(self._keepers)
            self.keep(cached_places(caches))
            self._results += self._keepers[before:]
        return frozenset(name for keeper in self._keepers for name in keeper.changed())

    def now(self) -> SavedValues:
        """Save the values that the variables have now."""
        return SavedValues([keeper.now() for keeper in self._keepers])

    def put_back(self, *, empty_caches: bool = False) -> None:
        """Set all variables to their first values, as they are in a new process.

        Args:
            empty_caches: Whether cached functions also forget their results.
        """
        SavedValues(self._keepers).put_back()
        if empty_caches:
            empty: dict[Any, Any] = {}
            for keeper in self._keepers:
                keeper.empty_caches(empty)

    def moved_results(self, before: SavedValues) -> frozenset[str]:
        """Return the names of cached results that have changed.

        Args:
            before: The values of the variables before, saved after the last call of ``changed``.
        """
        pairs = zip(self._keepers, before.keepers, strict=True)
        saved = [was for keeper, was in pairs if keeper in self._results]
        return frozenset(name for keeper in saved for name in keeper.changed())
