"""Cache of objects made from hyper-parameters, shared by trials with equal values of those read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thrifty.core import derive_seed
from thrifty.pack import HyperParameters, borrowed_streams
from thrifty.pack._hyperparameters import unread, values_of
from thrifty.pack._random import seed_everything


class Made:
    """Calls ``make(hp)`` once for each combination of the hyper-parameters that it reads.

    Random draws of ``make`` depend only on the trial's seed, so the result does not depend on which
    trial came first. The cache is not sent to other processes with the task: each process makes its
    own objects.

    >>> rows = Made(lambda hp: list(range(hp.rows)))
    >>> first = rows.get(HyperParameters({"rows": 3, "lr": 0.1}), seed=0)
    >>> first is rows.get(HyperParameters({"rows": 3, "lr": 0.2}), seed=0)
    True
    """

    def __init__(self, make: Callable[[HyperParameters], Any]) -> None:
        self._make = make
        self._known: list[tuple[int, HyperParameters, Any]] = []

    def __getstate__(self) -> Callable[[HyperParameters], Any]:
        return self._make

    def __setstate__(self, make: Callable[[HyperParameters], Any]) -> None:
        self._make, self._known = make, []

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        return self  # each trial has its own task, and all share this cache

    def get(self, hp: HyperParameters, *, seed: int) -> Any:
        """Return the object that ``make`` returns for these hyper-parameters."""
        for of_seed, given, value in self._known:
            # Compare names now: a data module may keep its `hp` and read more of it later.
            read = given.names_read
            if of_seed == seed and values_of(hp, read) == values_of(given, read):
                hp.names_read |= read
                return value
        fresh = unread(hp)
        with borrowed_streams():
            seed_everything(derive_seed(seed, "data"))
            value = self._make(fresh)
        self._known.append((seed, fresh, value))
        hp.names_read |= fresh.names_read
        return value
