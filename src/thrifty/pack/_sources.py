"""The data of a task, loaded once for all trials in this process that use them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._alive_sources import AliveSources
from ._data import Source, open_source
from ._hyperparameters import HyperParameters
from ._task import Task


class Sources:
    """Data by what they depend on: trials that agree on what ``Task.data`` reads share one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = AliveSources[dict[str, Any]]()

    def get(self, task: Task, hp: HyperParameters) -> Source:
        """The data for these hyper-parameters, loaded if need be."""
        for read, source in self._known:
            if hp.subset(set(read)) == read:
                hp.names_read |= set(read)
                self._known.use(source)
                return source
        fresh = HyperParameters(hp.subset(set(hp)))
        source = open_source(task.data(fresh), device=self._device)
        self._known.add(fresh.subset(fresh.names_read), source)
        hp.names_read |= fresh.names_read
        return source

    def number_of(self, source: Source) -> int:
        """What tells a source of this task from all others, also from those that are gone."""
        return self._known.number_of(source)


# while the task lives: the check before a study and the worker in this process load once
_SOURCES: WeakKeyDictionary[Task, dict[torch.device, Sources]] = WeakKeyDictionary()


def sources_of(task: Task, device: torch.device) -> Sources:
    """The shared sources of a task on a device."""
    return _SOURCES.setdefault(task, {}).setdefault(device, Sources(device))
