"""Data sets of trials, opened once and freed when no trial uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from ._data import Source, open_source
from ._hyperparameters import HyperParameters, share, unread, values_of
from ._task import Task


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


class Sources:
    """Data sets, shared by trials that agree on what ``Task.data`` reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = AliveSources[HyperParameters]()
        self.load_s = 0.0
        """How many seconds the last load of data took."""

    def get(self, task: Task, hp: HyperParameters) -> Source:
        """Return the data for these hyper-parameters, and load them if necessary."""
        for given, source in self._known:
            # data may keep the hyper-parameters they were given, and read more of them later
            names = given.names_read
            if values_of(hp, names) == values_of(given, names):
                hp.names_read |= names
                share(given, hp)
                self._known.use(source)
                return source
        began = time.perf_counter()
        given, source = self._load(task, hp)
        self.load_s = time.perf_counter() - began
        self._known.add(given, source)
        hp.names_read |= given.names_read
        return source

    def number_of(self, source: Source) -> int:
        """Return a number unique to a source among all sources of this task, past ones included."""
        return self._known.number_of(source)

    def _load(self, task: Task, hp: HyperParameters) -> tuple[HyperParameters, Source]:
        """Load data; return them with their hyper-parameters, which record what was read."""

        def load() -> tuple[ref[HyperParameters], set[str], Source]:
            given = unread(hp)
            source = open_source(task.data(given), device=self._device)
            return ref(given), given.names_read, source

        held, names, source = load()
        given = held()
        if given is not None:
            _touch(source, given)
            return given, source
        given = unread(hp)
        given.names_read = names
        return given, source


def _touch(source: Source, given: HyperParameters) -> None:
    """Read a row to find the hyper-parameters that it reads, before other trials share the data."""
    if getattr(source, "has_workers", False):
        # loader processes may read any hyper-parameter, which is not visible here
        given.names_read.update(given)
        return
    next(iter(source.train_batches(seed=0, epoch=0, batch_size=1)))
    next(iter(source.valid_batches(batch_size=1)))


# kept as long as the task: the check before a study and the worker in this process load once
_SOURCES: WeakKeyDictionary[Task, dict[torch.device, Sources]] = WeakKeyDictionary()


def sources_of(task: Task, device: torch.device) -> Sources:
    """Return the shared sources of a task on a device."""
    return _SOURCES.setdefault(task, {}).setdefault(device, Sources(device))
