"""What some code may change: kept as it is now, compared later, and put back."""

from __future__ import annotations

import os
import random
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from thrifty.pack.identity import MISSING, Place, reach, vars_of

from ._same import same


MAX_BYTES = 64 * 2**20
"""Larger arrays and tensors are not kept."""
MAX_ELEMENTS = 10_000
"""Longer containers are kept, but not what is inside their elements."""
MAX_DEPTH = 4

KINDS = frozenset({"global", "closure", "class attribute", "attribute", "item", "slot"})
"""Places that training code may write to."""

_VARIABLE = re.compile("[A-Z][A-Z0-9_]+")
"""What names of environment variables look like."""

_MAKERS = ("data", "model", "optimizer")
"""Methods of a task that run before training, and may keep caches."""


class Keeper:
    """Keeps the values of some places, and what is inside them.

    Containers, arrays, tensors, random generators and the tensors of modules are kept with their
    content. Of other objects only their own places are, if they are among those given.

    >>> from thrifty.pack.identity import Place
    >>> counts = {"seen": [1]}
    >>> keeper = Keeper([Place(name="counts", kind="global", holder={"counts": counts}, key="counts")])
    >>> counts["seen"].append(2)
    >>> keeper.changed()
    ['counts']
    >>> keeper.put_back()
    >>> counts
    {'seen': [1]}
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = [place for place in places if place.kind in KINDS]
        self._values = [place.get() for place in self._places]
        self._contents = [list(_contents(value)) for value in self._values]
        self._spaces = [
            (place, vars_of(place.holder), dict(vars_of(place.holder)))
            for place in _one_for_each_holder(self._places)
        ]

    @property
    def keys(self) -> set[tuple[int, Any]]:
        """What identifies the places."""
        return {(id(place.holder), place.key) for place in self._places}

    def now(self) -> Keeper:
        """Keep the same places as they are now."""
        return Keeper(self._places)

    def changed(self) -> list[str]:
        """Name the places that are not what they were."""
        out = [
            place.name
            for place, value, contents in zip(
                self._places, self._values, self._contents, strict=True
            )
            if (_is_other(place.get(), value) and not is_cache(place, value))
            or any(not held.is_as_before() for held in contents)
        ]
        for place, names, before in self._spaces:
            owner = place.name.rpartition(".")[0]
            out += [f"{owner}.{name}" for name in names.keys() - before.keys()]
        return out

    def put_back(self) -> None:
        """Put everything back that is not what it was."""
        for contents in self._contents:
            for held in contents:
                if not held.is_as_before():
                    held.put_back()
        for place, value in zip(self._places, self._values, strict=True):
            if place.get() is not value:
                place.set(value)
        for _, names, before in self._spaces:
            for name in names.keys() - before.keys():
                del names[name]
            for name in before.keys() - names.keys():
                names[name] = before[name]


def _one_for_each_holder(places: Iterable[Place]) -> list[Place]:
    return list({id(p.holder): p for p in places if p.kind == "attribute"}.values())


def training_places(roots: Mapping[str, Any]) -> list[Place]:
    """Find what training steps and evaluations read; not what makes data, models and optimizers.

    Args:
        roots: Code and objects by name: a task, a loss, a module.
    """
    models = {n: root for n, root in roots.items() if isinstance(root, torch.nn.Module)}
    others = {n: root for n, root in roots.items() if n not in models}
    both = (reach(others, without=_MAKERS), reach(models))
    functions = [each.value for found in both for each in found.functions]
    places = [*both[0].places, *both[1].places, *_environment_places(functions)]
    return list({(id(place.holder), place.key): place for place in places}.values())


def _environment_places(functions: Iterable[FunctionType]) -> Iterator[Place]:
    """The variables of the environment whose names stand in some functions."""
    constants: list[Any] = [function.__code__ for function in functions]
    while constants:
        constant = constants.pop()
        if isinstance(constant, CodeType):
            constants.extend(constant.co_consts)
        elif isinstance(constant, tuple | frozenset):
            constants.extend(constant)
        elif isinstance(constant, str) and _VARIABLE.fullmatch(constant):
            name = f"os.environ[{constant!r}]"
            yield Place(name=name, kind="item", holder=os.environ, key=constant)


def is_cache(place: Place, before: Any) -> bool:
    """Whether a value that is new is one that an installed class keeps to itself, such as the text of a path."""
    return before is MISSING and not place.own


def _is_other(now: Any, before: Any) -> bool:
    return now is not before and not (type(now) is type(before) and same(now, before))


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of one object, and how it is read and written."""

    value: Any
    before: Any
    handler: _Handler

    def is_as_before(self) -> bool:
        return self.handler.equal(self.handler.read(self.value), self.before)

    def put_back(self) -> None:
        self.handler.write(self.value, self.before)


@dataclass(frozen=True, slots=True)
class _Handler:
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    equal: Callable[[Any, Any], bool] = same


def _contents(value: Any, depth: int = 0) -> Iterator[_Held]:
    """All that is inside a value and may change while the value stays the same object."""
    handler = _HANDLERS.get(type(value)) or _handler_of(value)
    if handler is not None:
        yield _Held(value, handler.read(value), handler)
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _contents(tensor, depth)
    if depth < MAX_DEPTH and type(value) in _ITERATED and len(value) <= MAX_ELEMENTS:
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _contents(each, depth + 1)


def _handler_of(value: Any) -> _Handler | None:
    if isinstance(value, torch.Tensor):
        return _TENSOR if not value.is_sparse and value.nbytes <= MAX_BYTES else None
    if isinstance(value, np.ndarray):
        fits = value.nbytes <= MAX_BYTES and value.flags.writeable and not value.dtype.hasobject
        return _ARRAY if fits else None
    if isinstance(value, random.Random):
        return _PYTHON_RANDOM
    return None


def _fill(value: Any, before: Any) -> None:
    value.clear()
    value.update(before)


def _fill_sequence(value: Any, before: Any) -> None:
    value.clear()
    value.extend(before)


def _shallow(one: Any, other: Any) -> bool:
    """Whether two sequences hold the same objects; what is inside them is compared by itself."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and same(a, b)) for a, b in zip(one, other, strict=True)
    )


def _shallow_mapping(one: Any, other: Any) -> bool:
    return list(one) == list(other) and _shallow(list(one.values()), list(other.values()))


def _write_tensor(value: torch.Tensor, before: torch.Tensor) -> None:
    if value.shape == before.shape:
        value.data.copy_(before)
    else:
        value.data = before.clone()


def _write_array(value: Any, before: Any) -> None:
    value[...] = before


_SEQUENCE = _Handler(list, _fill_sequence, _shallow)
_MAPPING = _Handler(dict, _fill, _shallow_mapping)
_TENSOR = _Handler(lambda value: value.detach().clone(), _write_tensor)
_ARRAY = _Handler(lambda value: value.copy(), _write_array)
_PYTHON_RANDOM = _Handler(lambda value: value.getstate(), lambda value, s: value.setstate(s))


def _write_numpy_generator(value: np.random.Generator, before: Any) -> None:
    value.bit_generator.state = before


_HANDLERS: Mapping[type, _Handler] = {
    list: _SEQUENCE,
    deque: _SEQUENCE,
    bytearray: _SEQUENCE,
    dict: _MAPPING,
    defaultdict: _MAPPING,
    OrderedDict: _MAPPING,
    Counter: _MAPPING,
    set: _Handler(set, _fill),
    torch.Generator: _Handler(
        lambda value: value.get_state().clone(), lambda value, state: value.set_state(state)
    ),
    np.random.Generator: _Handler(
        lambda value: value.bit_generator.state, _write_numpy_generator
    ),
    np.random.RandomState: _Handler(
        lambda value: value.get_state(), lambda value, state: value.set_state(state)
    ),
}

_ITERATED = frozenset({list, tuple, deque, dict, defaultdict, OrderedDict})
