"""What trials keep for those that begin after them, and a check that it depends on none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.pack.identity import reach
from thrifty.pack.verify import Keeper


class MadeOnce:
    """What code keeps when it runs first: in variables, and under ``functools.cache``.

    A value that is drawn from a seeded stream, and kept, depends on the trial that made it. It
    shows in the stream: if a trial is made a second time with the same seed, nothing is drawn for
    the value that was kept, so the stream ends elsewhere.

    Example::

        kept = MadeOnce({"task": task})
        task.model(hp)
        kept.take_changed()  # ["CACHE", "projection(...)"]

    Args:
        roots: Code and objects by name, such as a task.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._keeper = Keeper(reach(roots).places, containers_only=True)
        self._num_calls = self._count_calls()

    def take_changed(self) -> list[str]:
        """Return the names of what has been made since the last call."""
        changed = self._changed()
        if changed:
            self._keeper, self._num_calls = self._keeper.now(), self._count_calls()
        return changed

    def has_changed(self) -> bool:
        """Return whether anything has been made since the last call of ``take_changed``."""
        return bool(self._changed())

    def _changed(self) -> list[str]:
        now = self._count_calls().items()
        filled = [name for name, number in now if number != self._num_calls.get(name, 0)]
        return self._keeper.changed() + filled

    def _count_calls(self) -> dict[str, int]:
        """Return how often each cached function has had to compute its result."""
        return {cached_name(each): each.cache_info().misses for each in self._keeper.caches}


def cached_name(cache: Any) -> str:
    """Return the name of a function under ``functools.lru_cache``, for messages."""
    return f"{cache.__wrapped__.__qualname__}(...)"


def drawn_once(name: str, kept: Sequence[str]) -> str:
    """Return a message about random numbers that are drawn for one trial and kept for others."""
    places = ", ".join(map(repr, kept[:5]))
    return (
        f"{name} keeps random numbers that it has drawn for one trial (in {places}), so the "
        "results of a trial would depend on the trials before it in the same process; draw what "
        "is made only once from a generator with a seed of its own, such as "
        "torch.Generator().manual_seed(0), or make it anew for each trial"
    )
