"""The data of a task, loaded once for everybody in this process."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._data import Source, open_source
from ._hyperparameters import HyperParameters, read_by, values_of
from ._task import Task


class Sources:
    """Data by what they depend on: trials that agree on what ``Task.data`` reads share one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[tuple[dict[str, Any], Source]] = []

    def get(self, task: Task, hp: HyperParameters) -> Source:
        """The data for these hyper-parameters, loaded if need be."""
        for read, source in self._known:
            if values_of(hp, read) == read:
                hp.names_read |= set(read)
                return source
        source, read = read_by(lambda own: open_source(task.data(own), device=self._device), hp)
        self._known.append((read, source))
        hp.names_read |= set(read)
        return source


# as long as the task lives: the check before a study and the worker in this process load once
_SOURCES: WeakKeyDictionary[Task, dict[torch.device, Sources]] = WeakKeyDictionary()


def sources_of(task: Task, device: torch.device) -> Sources:
    """The shared sources of a task on a device."""
    return _SOURCES.setdefault(task, {}).setdefault(device, Sources(device))
