"""Models that are made once for a trial and copied for each of its epochs."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from thrifty.pack import HyperParameters
from thrifty.pack.task._task import values_of


_LIBRARIES = frozenset({"torch", "transformers", "peft"})


class ModelCopies:
    """Calls ``make(hp)`` once for a trial, and again if what it reads of ``hp`` has changed.

    Each epoch gets a new model: a copy of the first one as it was before training, if
    ``is_copyable``, and otherwise one that ``make`` returns.

    >>> copies = ModelCopies(lambda hp: torch.nn.Linear(hp.width, 1))
    >>> first = copies.get(HyperParameters({"width": 3, "lr": 0.1}))
    >>> second = copies.get(HyperParameters({"width": 3, "lr": 0.2}))
    >>> second is first, bool((second.weight == first.weight).all())
    (False, True)
    """

    def __init__(self, make: Callable[[HyperParameters], torch.nn.Module]) -> None:
        self._make = make
        self._read: Mapping[str, Any] = {}
        self._original: torch.nn.Module | None = None

    def get(self, hp: HyperParameters) -> torch.nn.Module:
        """Return an untrained model for these hyper-parameters."""
        if self._original is not None and values_of(hp, self._read) == self._read:
            hp.names_read |= self._read.keys()
            return copy.deepcopy(self._original)
        self._original = None  # free its memory before another one is made
        before = set(hp.names_read)
        hp.names_read.clear()
        try:
            model = self._make(hp)
            self._read = values_of(hp, hp.names_read)
        finally:
            hp.names_read |= before
        self._original = copy.deepcopy(model) if is_copyable(model) else None
        return model


def is_copyable(model: Any) -> bool:
    """Return whether a copy of a model is certain to be the same as another one made like it.

    All its modules must be classes of torch, transformers or peft. A class of the user may share
    an object with other code, and a function in a hook may refer to the model itself. Copies of
    tensors on a GPU would need too much of its memory.

    >>> is_copyable(torch.nn.Linear(1, 1))
    True
    """
    if not isinstance(model, torch.nn.Module):
        return False
    tensors = (*model.parameters(), *model.buffers())
    if not all(tensor.is_leaf and tensor.device.type == "cpu" for tensor in tensors):
        return False
    return all(
        _is_of_library(type(module)) and all(map(_is_plain, vars(module).values()))
        for module in model.modules()
    )


def _is_of_library(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _LIBRARIES


def _is_plain(value: Any) -> bool:
    """Return whether an attribute of a module refers to nothing outside of libraries."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and _is_of_library(value)
    if isinstance(value, types.MethodType | partial):
        return False
    kind = type(value)
    return kind.__module__ in ("builtins", "enum") or _is_of_library(kind)
