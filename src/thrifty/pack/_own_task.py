"""A trial's own copy of a task, so that what one trial stores in it does not reach another."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset


LARGE_BYTES = 2**20
"""The size in bytes from which arrays are shared, so that trials do not each copy a data set."""

AnyTask = TypeVar("AnyTask")


def own_task(task: AnyTask) -> AnyTask:
    """Copy a task for one trial, its attributes included.

    Data sets, large arrays, and attributes that cannot be copied are shared.

    >>> class Noting:
    ...     def __init__(self):
    ...         self.notes = []
    >>> task = Noting()
    >>> own_task(task).notes.append(1)
    >>> task.notes
    []
    """
    out = copy(task)
    memo: dict[int, Any] = {id(task): out}
    for name, value in vars(task).items():
        if not _is_shared(value):
            try:
                vars(out)[name] = deepcopy(value, memo)
            except Exception:  # noqa: BLE001 (an attribute may be a lock, a generator, a file)
                continue
    return out


def _is_shared(value: Any) -> bool:
    if isinstance(value, Dataset):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.nbytes >= LARGE_BYTES)
    if isinstance(value, list | tuple):
        return any(map(_is_shared, value))
    return isinstance(value, dict) and any(map(_is_shared, value.values()))
