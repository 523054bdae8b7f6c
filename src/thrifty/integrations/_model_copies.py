"""Models that are made once for a trial and copied for each of its epochs."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from thrifty.pack import HyperParameters, borrowed_streams
from thrifty.pack._state import seed_everything
from thrifty.pack.task._task import values_of
from thrifty.pack.verify import Watch

from ._object_graphs import made_again


_LIBRARIES = frozenset({"torch", "transformers", "peft"})


class ModelCopies:
    """Calls ``make(hp)`` once for a trial, and again if something that it reads has changed.

    That may be a value of ``hp``, a global or something in a closure. What it reads from files is
    not noticed.

    Each epoch gets a new model: a copy of one that has not been trained, if the copy is certain to
    be the same as what ``make`` would return, and otherwise what ``make`` returns. Models of
    libraries are certain to be (``is_copyable``). Others are compared in the third epoch, with all
    that they refer to (``made_again``).

    >>> copies = ModelCopies(lambda hp: torch.nn.Linear(hp.width, 1))
    >>> first = copies.get(HyperParameters({"width": 3, "lr": 0.1}), seed=0)
    >>> second = copies.get(HyperParameters({"width": 3, "lr": 0.2}), seed=0)
    >>> second is first, bool((second.weight == first.weight).all())
    (False, True)
    """

    def __init__(self, make: Callable[[HyperParameters], torch.nn.Module]) -> None:
        self._make = make
        self._read: Mapping[str, Any] = {}
        self._num_made = 0
        """How often a model was made from the values that are read now."""
        self._original: torch.nn.Module | None = None
        self._watch: Watch | None = None
        """What ``make`` reads besides ``hp``; None without an original."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: ``make`` alone, since a watch cannot be copied."""
        return vars(ModelCopies(self._make))

    def get(self, hp: HyperParameters, *, seed: int) -> torch.nn.Module:
        """Return an untrained model for these hyper-parameters.

        Args:
            hp: The hyper-parameters.
            seed: Seed of what ``make`` draws at random.
        """
        if self._watch is not None:
            if values_of(hp, self._read) == self._read and not self._watch.changed():
                hp.names_read |= self._read.keys()
                return copy.deepcopy(self._original)  # type: ignore[return-value]
            # Free the memory of the original before another one is made.
            self._original, self._watch, self._num_made = None, None, 0
        model, read = self._made(hp, seed=seed)
        self._num_made = self._num_made + 1 if read == self._read else 1
        self._read = read
        if is_copyable(model):
            self._original = copy.deepcopy(model)
        elif self._num_made == _NUM_BEFORE_COMPARED and _num_bytes(model) <= _MOST_BYTES:
            of, make = model, partial(self._made, hp, seed=seed)
            with borrowed_streams():
                # The one made last is trained: user code may have noted down which one that is.
                model, is_same = made_again(of, make=lambda: make()[0])
            self._original = of if is_same else None
        if self._original is not None:
            self._watch = Watch({"make": self._make})
            if self._watch.unwatchable:  # an iterator cannot be compared with what it was
                self._original, self._watch = None, None
        return model

    def _made(self, hp: HyperParameters, *, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
        before = set(hp.names_read)
        hp.names_read.clear()
        try:
            seed_everything(seed)
            model = self._make(hp)
            return model, dict(values_of(hp, hp.names_read))
        finally:
            hp.names_read |= before


_NUM_BEFORE_COMPARED = 3
"""Making models twice for a comparison does not pay in a trial of few epochs."""

_MOST_BYTES = 2**30
"""Three models are compared, in memory at once."""


def _num_bytes(model: Any) -> int:
    if not isinstance(model, torch.nn.Module):
        return _MOST_BYTES + 1
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


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
