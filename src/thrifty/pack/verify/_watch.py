"""A watch on values that recorded code reads: closures, globals, attributes, ``requires_grad``.

These values may change between steps, but a recorded program has them built in. The watch compares
them with what they were, so that a change is noticed before the next step and not only by the next
check. The design follows the guards of ``torch.compile``.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import torch

from thrifty.pack._frozen import places_in_memory
from thrifty.pack.identity import MISSING, Place, Unsearched, held_by, is_iterator, vars_of

from ._keeper import IMMUTABLE, elements, local_names, training_places


MAX_ELEMENTS = 256
"""The number of elements above which a container is compared by its length and some elements."""
MAX_DEPTH = 8

_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A watched value that has changed.

    Attributes:
        name: Where the value is, in readable form.
        is_own: Whether it is an attribute of one of the watched objects or of their modules, and
            not of the code that all objects share.
        holder: The object that holds the value.
        objects: Identities of the objects that were written to: the holder, and what is inside the
            value.
    """

    name: str
    is_own: bool
    holder: Any = field(default=None, repr=False, compare=False)
    objects: frozenset[int] = field(default=frozenset(), repr=False, compare=False)


class Watch(Unsearched):
    """The values that some code reads, and whether one of them has changed since.

    A look that finds nothing takes about a microsecond per module.

    Args:
        roots: The code and the objects to watch, by name: a loss, a task, a module.
        ignored: Attributes that are followed in another way, as pairs of their object and name.
        memory: Whether parameters and buffers must keep their addresses in memory.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        ignored: Iterable[tuple[object, str]] = (),
        memory: bool = False,
    ) -> None:
        skipped = {(id(holder), name) for holder, name in ignored}
        self.iterators: dict[str, int] = {}
        """Values that cannot be compared with what they were: identities by name, in order."""
        self._memory = memory
        self._models = {n: root for n, root in roots.items() if isinstance(root, torch.nn.Module)}
        self._places = [
            place
            for place in training_places(roots)
            if (id(place.holder), place.key) not in skipped and not _is_mode(place)
        ]
        self._own = {id(root) for root in roots.values()}
        self._own |= {id(m) for model in self._models.values() for m in model.modules()}
        self.look()

    def look(self) -> None:
        """Take all values as they are now as the reference, without searching for new places."""
        self._spaces: dict[int, _Namespace] = {}
        self._cells: list[tuple[Any, Place]] = []
        self._contents: list[tuple[Place, Any]] = []
        for place in self._places:
            self._add(place)
        self._modules = [
            _Module(f"{name}.{path}" if path else name, module, memory=self._memory)
            for name, model in self._models.items()
            for path, module in model.named_modules()
        ]
        self._glance = _Glance(
            list(self._spaces.values()),
            [place for _, place in self._cells],
            self._modules,
            memory=self._memory,
        )

    def _add(self, place: Place) -> None:
        value = place.get()
        if is_iterator(value):
            self.iterators[place.name] = id(value)
        namespace = _namespace(place)
        if namespace is not None:
            space = self._spaces.setdefault(id(namespace), _Namespace(namespace))
            space.add(place, value)
        elif place.kind == "closure":
            self._cells.append((value, place))
        if _has_contents(value) or (namespace is None and place.kind != "closure"):
            self._contents.append((place, token(value)))

    @property
    def unwatchable(self) -> str:
        """The name of a value that cannot be compared, such as an iterator; "" if there is none."""
        return next(iter(self.iterators), "")

    def changed(self) -> Change | None:
        """Return a value that is not what it was; None if there is none."""
        return next(self.changes(), None)

    def changes(self) -> Iterator[Change]:
        """Yield all values that are not what they were."""
        if not self._glance.is_same():
            for space in list(self._spaces.values()):
                yield from map(self._change, space.changes())
            for value, place in self._cells:
                now = place.get()
                if now is not value and not _equal(now, value):
                    yield self._change(place)
            for module in self._modules:
                if module.changed():
                    yield _change(module.name, module.module, is_own=True)
        for place, before in self._contents:
            if token(place.get()) != before and not (before == _NOTHING and not place.own):
                yield self._change(place)

    def read_of(self, holder: object) -> frozenset[str]:
        """Return the names of the attributes of an object that the code reads."""
        return frozenset(
            str(place.key)
            for place in self._places
            if place.holder is holder and place.kind == "attribute" and place.key
        )

    def objects(self) -> set[int]:
        """Return identities of objects that hold a watched value or are inside a mutable one."""
        out = {id(place.holder) for place in self._places} | self._own
        for place, _ in self._contents:
            out.update(_inside(place.get()))
        return out

    def _change(self, place: Place) -> Change:
        is_own = id(place.holder) in self._own
        return _change(place.name, place.holder, *_inside(place.get()), is_own=is_own)


def _change(name: str, holder: Any, *inside: int, is_own: bool) -> Change:
    return Change(name=name, is_own=is_own, holder=holder, objects=frozenset({id(holder), *inside}))


class _Namespace:
    """Names in one dict: a module's, a class's, an instance's."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.keys: list[str] = []
        self._places: list[Place] = []
        self._values: list[Any] = []

    def add(self, place: Place, value: Any) -> None:
        self.keys.append(place.key)
        self._places.append(place)
        self._values.append(value)

    def changes(self) -> Iterator[Place]:
        for key, value, place in zip(self.keys, self._values, self._places, strict=True):
            now = self.names.get(key, MISSING)
            if now is not value and not _equal(now, value):
                yield place


class _Module:
    """The facts of a module that a pack relies on.

    These are its tensors and where they are in memory, its children, and that it has no new hooks.
    """

    def __init__(self, name: str, module: torch.nn.Module, *, memory: bool) -> None:
        self._memory = memory
        self.name = name
        self.module = module
        self._children = list(module._modules.values())
        self._held = [*module._parameters.values(), *module._buffers.values()]
        self.tensors = [t for t in self._held if t is not None]
        self.hooks = [
            held
            for key, held in vars(module).items()
            if key.endswith(_HOOKS) and "state_dict" not in key
        ]
        self._facts = _facts(self.tensors, self.hooks, memory=memory)

    def changed(self) -> bool:
        module = self.module
        return (
            not _are_same([*module._parameters.values(), *module._buffers.values()], self._held)
            or not _are_same(list(module._modules.values()), self._children)
            or _facts(self.tensors, self.hooks, memory=self._memory) != self._facts
        )


def _facts(
    tensors: Sequence[torch.Tensor], hooks: Iterable[Sized], *, memory: bool
) -> list[bool | int]:
    trained = map(attrgetter("requires_grad"), tensors)
    places = places_in_memory(tensors) if memory else ()
    return [*trained, *map(num_hooks, tensors), *places, *map(len, hooks)]


def num_hooks(tensor: torch.Tensor) -> int:
    """Return how many hooks a tensor has, which see or change its gradient."""
    return len(tensor._backward_hooks or ()) + len(tensor._post_accumulate_grad_hooks or ())


class _Glance:
    """What names, cells and modules hold, by identity, and the facts of all modules at once.

    If all of it is the same, no single one needs to be looked at.
    """

    def __init__(
        self,
        spaces: Iterable[_Namespace],
        cells: Sequence[Place],
        modules: Sequence[_Module],
        *,
        memory: bool,
    ) -> None:
        self._names = [(space.names.get, key) for space in spaces for key in space.keys]
        self._cells = cells
        self._modules = [each.module for each in modules]
        self._tensors = [tensor for each in modules for tensor in each.tensors]
        self._hooks = [hook for each in modules for hook in each.hooks]
        self._memory = memory
        self._held, self._before = self._read()

    def is_same(self) -> bool:
        held, facts = self._read()
        return _are_same(held, self._held) and facts == self._before

    def _read(self) -> tuple[list[Any], list[bool | int]]:
        parts = list(chain.from_iterable(map(_PARTS, self._modules)))
        held = [get(key, MISSING) for get, key in self._names]
        held += [place.get() for place in self._cells]
        held += chain.from_iterable(map(_VALUES, parts))
        facts = _facts(self._tensors, self._hooks, memory=self._memory)
        return held, [*facts, *map(len, parts)]


_PARTS = attrgetter("_parameters", "_buffers", "_modules")
_VALUES = methodcaller("values")  # scripted modules have wrappers that are no dicts


def _are_same(held: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects, and not only equal ones."""
    return len(held) == len(before) and all(map(is_, held, before))


def token(value: Any, depth: int = 0) -> Any:
    """Return a stand-in that differs if the value has changed, as far as can be seen cheaply.

    >>> numbers = [1, 2]
    >>> before = token(numbers)
    >>> numbers.append(3)
    >>> token(numbers) == before
    False
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return (kind, value)
    make = _maker(kind)  # type: ignore[arg-type]  # mypy: a class is not hashable
    if make is not None and depth < MAX_DEPTH:
        return make(value, depth)
    if isinstance(value, torch.Tensor):
        return (id(value), value._version, value.requires_grad)
    if isinstance(value, torch.Generator):
        return (id(value), bytes(value.get_state().numpy()))
    if isinstance(value, np.random.Generator):
        return (id(value), repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return (id(value), repr(value.get_state(legacy=False)["state"]))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return (id(value), value.getstate())
    return (kind, id(value))


def _sequence(value: Any, depth: int) -> Any:
    kind = next(each for each in _SEQUENCES if issubclass(type(value), each))
    num = kind.__len__(value)
    some = islice(kind.__iter__(value), None, None, max(1, num // MAX_ELEMENTS))
    return (type(value), num, *(token(each, depth + 1) for each in some))


def _mapping(value: Any, depth: int) -> Any:
    num = dict.__len__(value)
    some = islice(dict.items(value), None, None, max(1, num // MAX_ELEMENTS))
    return (dict, num, *((token(k, depth), token(v, depth + 1)) for k, v in some))


def _local(value: Any, depth: int) -> Any:
    return (threading.local, _mapping(local_names(value), depth))


def _context(value: Any, depth: int) -> Any:
    return (ContextVar, token(held_by(value), depth + 1))


def _numbers(value: Any, depth: int) -> Any:  # noqa: ARG001 (all have the same signature)
    some = value if len(value) <= MAX_ELEMENTS else value[:: len(value) // MAX_ELEMENTS]
    return (type(value), len(value), bytes(some))


def _set(value: Any, depth: int) -> Any:  # noqa: ARG001 (all have the same signature)
    return (set, id(value), len(value), *sorted(map(hash, value)))


def _array(value: Any, depth: int) -> Any:  # noqa: ARG001
    flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()
    some = flat if flat.size <= MAX_ELEMENTS else flat[:: flat.size // MAX_ELEMENTS]
    return (id(value), value.shape, some.tobytes())


_SEQUENCES = (list, tuple, deque)

_TOKENS: dict[type, Callable[[Any, int], Any]] = {
    list: _sequence,
    tuple: _sequence,
    deque: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    np.ndarray: _array,
    bytearray: _numbers,
    array: _numbers,
    threading.local: _local,
    ContextVar: _context,
}


@cache
def _maker(kind: type) -> Callable[[Any, int], Any] | None:
    """Return the function that makes stand-ins for a class or a class derived from it."""
    found = (make for each, make in _TOKENS.items() if issubclass(kind, each))
    return next(found, None)


_NOTHING = token(MISSING)


def _namespace(place: Place) -> Mapping[str, Any] | None:
    """Return the dict that holds a value, if there is one."""
    if place.kind in ("global", "item"):
        return place.holder if type(place.holder) is dict else None
    if place.kind == "class attribute":
        found: Mapping[str, Any] = type.__dict__["__dict__"].__get__(place.holder)
        return found
    if place.kind == "attribute":
        held = vars_of(place.holder)
        return held or None
    return None


def _has_contents(value: Any) -> bool:
    """Return whether something in a value may change while the value stays the same object."""
    return _maker(type(value)) is not None or isinstance(  # type: ignore[arg-type]
        value,
        torch.Tensor
        | torch.Generator
        | np.random.Generator
        | np.random.RandomState
        | random.Random,
    )


def _inside(value: Any, depth: int = 0) -> Iterator[int]:
    """Yield identities of a value that may change, and of those inside it."""
    if type(value) in IMMUTABLE or isinstance(value, type) or callable(value):
        return
    yield id(value)
    if depth < MAX_DEPTH:
        for each in elements(value)[:MAX_ELEMENTS]:
            yield from _inside(each, depth + 1)


def _is_mode(place: Place) -> bool:
    """Return whether a place is a module's ``training``, which training loops set at each step."""
    return place.key == "training" and isinstance(place.holder, torch.nn.Module)


def _equal(now: Any, value: Any) -> bool:
    """Return whether a value equals the old one: numbers, strings, containers of these."""
    return type(now) is type(value) and (token(now) == token(value) or _are_nan(now, value))


def _are_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and one != one and other != other
