"""Values that some code may change: saved now, compared later, and restored."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from thrifty.pack.identity import MISSING, Place, Reach, held_by, is_own, reach, vars_of
from thrifty.pack.identity._place import PlaceKind
from thrifty.pack.identity._settings import SETTINGS

from ._compare import same


MAX_BYTES = 64 * 2**20
"""The size in bytes above which arrays and tensors are not saved."""
MAX_ELEMENTS = 10_000
"""The length above which a container is saved without what is inside its elements."""
MAX_DEPTH = 8

KINDS = frozenset({
    "global", "closure", "default", "class attribute", "attribute", "item", "slot",
})  # fmt: skip
"""The kinds of places that training code may write to."""

_VARIABLE = re.compile("[A-Z][A-Z0-9_]+")
"""A pattern for the names of environment variables."""

_CACHED = type(lru_cache(len))
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_MAKERS = ("data", "model", "optimizer")
"""Methods of a task that run before training, and may keep caches."""


class Keeper:
    """A copy of the values of some places, and of what is inside them.

    Containers, arrays, tensors, random generators and the tensors of modules are saved with their
    content. Of other objects only their own places are, if these are among those given.

    Args:
        places: The places.
        containers_only: Whether the content of arrays, tensors and generators is left out, so that
            a look costs little.

    >>> from thrifty.pack.identity import Place
    >>> counts = {"seen": [1]}
    >>> keeper = Keeper([
    ...     Place(name="counts", kind="global", holder={"counts": counts}, key="counts")
    ... ])
    >>> counts["seen"].append(2)
    >>> keeper.changed()
    ['counts']
    >>> keeper.put_back()
    >>> counts
    {'seen': [1]}
    """

    def __init__(self, places: Iterable[Place], *, containers_only: bool = False) -> None:
        self._places = [place for place in places if place.kind in KINDS]
        self._values = [place.get() for place in self._places]
        self._containers_only = containers_only
        contents = _containers if containers_only else _contents
        self._contents = [list(contents(value)) for value in self._values]
        self._spaces = [_Space.of(place) for place in _one_for_each_holder(self._places)]

    @property
    def places(self) -> list[Place]:
        """The places that are saved."""
        return self._places

    @property
    def keys(self) -> set[tuple[int, Any]]:
        """The identities of the places."""
        return {(id(place.holder), place.key) for place in self._places}

    @property
    def caches(self) -> list[Any]:
        """The functions under ``functools.lru_cache`` that the places hold."""
        return caches_in(self._places)

    def empty_caches(self, empty: dict[Any, Any], *, only: Collection[Any] | None = None) -> None:
        """Give each place that holds a cached function one with an empty cache.

        Args:
            empty: Cached functions with empty caches, by those that they stand for; new ones are
                added.
            only: The cached functions that this is for (default: all).
        """
        for place in self._places:
            for cache in caches_in([place]):
                if only is not None and cache not in only:
                    continue
                if cache not in empty:
                    empty[cache] = lru_cache(**cache.cache_parameters())(cache.__wrapped__)
                    vars_of(empty[cache]).update(vars_of(cache))
                value = place.get()
                wraps = type(value) in (staticmethod, classmethod)
                place.set(type(value)(empty[cache]) if wraps else empty[cache])

    def now(self) -> Keeper:
        """Return a new keeper that saves the same places as they are now."""
        return Keeper(self._places, containers_only=self._containers_only)

    def grown(self) -> Keeper:
        """Return a new keeper like ``now``, which also saves the attributes that were added."""
        added = [place for space in self._spaces for place in space.places_added()]
        return Keeper([*self._places, *added], containers_only=self._containers_only)

    def changed(self) -> list[str]:
        """Return the names of the places whose values have changed."""
        return [place.name for place in self.places_changed()]

    def places_changed(self) -> list[Place]:
        """Return the places whose values have changed, and those of added attributes."""
        out = [
            place
            for place, value, contents in zip(
                self._places, self._values, self._contents, strict=True
            )
            if self._has_moved(place, value) or any(not held.is_as_before() for held in contents)
        ]
        return [*out, *(place for space in self._spaces for place in space.places_added())]

    def put_back(self) -> None:
        """Restore everything that has changed."""
        for contents in self._contents:
            for held in contents:
                if not held.is_as_before():
                    held.put_back()
        for place, value in zip(self._places, self._values, strict=True):
            now = place.get()
            if now is not value and not _is_wrapped_step(place.holder, place.key, now):
                place.set(value)
        for space in self._spaces:
            space.put_back()

    @staticmethod
    def _has_moved(place: Place, before: Any) -> bool:
        now = place.get()
        return (
            _is_other(now, before)
            and not is_cache(place, before)
            and not _is_wrapped_step(place.holder, place.key, now)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """The names that an instance, a function or a class has, as they were."""

    owner: str
    holder: Any
    before: Mapping[str, Any]

    @classmethod
    def of(cls, place: Place) -> _Space:
        owner = place.name.rpartition(".")[0]
        return cls(owner=owner, holder=place.holder, before=dict(_names_of(place.holder)))

    def places_added(self) -> list[Place]:
        """Return the places of the names that were added."""
        kind: PlaceKind = "class attribute" if isinstance(self.holder, type) else "attribute"
        return [
            Place(name=f"{self.owner}.{name}", kind=kind, holder=self.holder, key=name)
            for name in self._added()
        ]

    def _added(self) -> list[str]:
        names = _names_of(self.holder)
        return [
            name
            for name in names.keys() - self.before.keys()
            if not _is_wrapped_step(self.holder, name, names[name])
        ]

    def put_back(self) -> None:
        names = _names_of(self.holder)
        for name in self._added():
            if isinstance(self.holder, type):
                type.__delattr__(self.holder, name)
            else:
                del vars_of(self.holder)[name]
        for name in self.before.keys() - names.keys():
            if isinstance(self.holder, type):
                type.__setattr__(self.holder, name, self.before[name])
            else:
                vars_of(self.holder)[name] = self.before[name]


def _names_of(holder: Any) -> Mapping[str, Any]:
    """Return what an object holds by name; of a class, what the user's code may have put there."""
    if not isinstance(holder, type):
        return vars_of(holder)
    found = type.__dict__["__dict__"].__get__(holder)
    # Python stores its own data there: __annotations__, _abc_impl
    return {n: found[n] for n in found if not n.startswith(("__", "_abc_"))}


def _one_for_each_holder(places: Iterable[Place]) -> list[Place]:
    kinds = ("attribute", "class attribute")
    return list({id(p.holder): p for p in places if p.kind in kinds}.values())


def training_places(roots: Mapping[str, Any]) -> list[Place]:
    """Find what training steps and evaluations read, but not what makes data, models, optimizers.

    Args:
        roots: Code and objects by name: a task, a loss, a module.
    """
    models = {n: root for n, root in roots.items() if isinstance(root, torch.nn.Module)}
    others = {n: root for n, root in roots.items() if n not in models}
    both = (reach(others, without=_MAKERS), reach(models))
    functions = [each.value for found in both for each in found.functions]
    places = [
        *both[0].places,
        *both[1].places,
        *_empty_places(both),
        *_environment_places(functions),
        *SETTINGS.places(),
    ]
    places += cached_places(caches_in(places))
    return list({(id(place.holder), place.key): place for place in places}.values())


def kept_places(roots: Mapping[str, Any]) -> list[Place]:
    """Find the variables and attributes that code reads, and where it may add some.

    Args:
        roots: Code and objects by name, such as a task.
    """
    found = reach(roots)
    objects = [*roots.items(), *((place.name, place.get()) for place in found.places)]
    return [*found.places, *_empty_places([found]), *_places_of_objects(objects)]


def _is_wrapped_step(holder: Any, key: Any, now: Any) -> bool:
    """Return whether PyTorch has wrapped ``step``, as it does at a class's first instance.

    That is no change of the user's, and is not put back: instances would lose their hooks.
    """
    if key != "step" or not (
        isinstance(holder, type) and issubclass(holder, torch.optim.Optimizer)
    ):
        return False
    return getattr(now, "hooked", False) is True


def _places_of_objects(objects: Iterable[tuple[str, Any]]) -> Iterator[Place]:
    """Yield an empty place of each object, to detect which attributes it is given later."""
    for name, value in objects:
        kind = type(value)
        if (is_own(kind) and not issubclass(kind, type)) or kind in (SimpleNamespace, _CACHED):
            yield Place(name=f"{name}.", kind="attribute", holder=value, key="")


def _empty_places(found: Iterable[Reach]) -> Iterator[Place]:
    """Yield an empty place of each function and class, to detect what is added to them later."""
    for each in found:
        for function in each.functions:
            yield Place(name=f"{function.name}.", kind="attribute", holder=function.value, key="")
        for kind in each.classes:
            yield Place(name=f"{kind.name}.", kind="class attribute", holder=kind.value, key="")


MAX_RESULTS = 64
"""The number of results of a cached function that are watched: the oldest that it still keeps.

A cache of all rows of a data set holds thousands, and such rows do not change.
"""


class _Result(dict[int, Any]):
    """The holder of one result that a cache keeps."""


_RESULTS: WeakValueDictionary[int, _Result] = WeakValueDictionary()
"""Holders by the identity of their results, which they keep alive."""


def cached_places(caches: Iterable[Any]) -> list[Place]:
    """Find the results that cached functions keep now, and what code reads of them.

    A result that is added to a cache changes nothing: without a cache, the call would return the
    same. A result that is changed later reaches every caller.

    Args:
        caches: Functions under ``functools.lru_cache``.
    """
    places: list[Place] = []
    for cache in caches:
        for result in results_of(cache)[:MAX_RESULTS]:
            if type(result) not in IMMUTABLE:
                holder = _RESULTS.setdefault(id(result), _Result({0: result}))
                name = f"{cache.__wrapped__.__qualname__}(...)"
                places.append(Place(name=name, kind="item", holder=holder, key=0))
    return list(reach({}, places=places).places) if places else []


def results_of(cache: Any) -> list[Any]:
    """Return the results that a cached function keeps.

    Python gives no access to them, except through the references that the garbage collector sees.
    """
    if not cache.cache_info().currsize:
        return []
    seen = gc.get_referents(cache)
    tables = [each for each in seen if type(each) is dict and each is not vars_of(cache)]
    if cache.cache_parameters()["maxsize"] is None:
        # only the table of results holds as many as the cache says
        sized = [each for each in tables if len(each) == cache.cache_info().currsize]
        return list(sized[0].values()) if sized else []
    links = [t for t in tables if any("lru_list" in type(v).__name__ for v in t.values())]
    keys = {id(key) for table in links for key in table}
    others = {id(cache.__wrapped__), *map(id, links), id(vars_of(cache))}
    return [
        each
        for each in seen
        if id(each) not in keys | others and not isinstance(each, type) and type(each) is not object
    ]


def caches_in(places: Iterable[Place]) -> list[Any]:
    """Return the functions under ``functools.lru_cache`` that some places hold."""
    found = [place.get() for place in places]
    values = [v.__func__ if type(v) in (staticmethod, classmethod) else v for v in found]
    return [v for v in values if type(v) is _CACHED]


@contextmanager
def as_it_was(roots: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Restore, on exit, all values that some code may change.

    Yields the functions with an empty ``functools.lru_cache`` that the code reaches.

    Args:
        roots: Code and objects by name: a task, a loss, a module.
    """
    places = training_places(roots)
    keeper = Keeper(places)
    caches = [each for each in caches_in(places) if not each.cache_info().currsize]
    try:
        yield caches
    finally:
        keeper.put_back()
        for cache in caches:
            cache.cache_clear()


def _environment_places(functions: Iterable[FunctionType]) -> Iterator[Place]:
    """Yield the environment variables whose names occur in some functions."""
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
    """Return whether a new value is an installed class's own cache, such as a path's text."""
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
    """Yield what is inside a value and may change while the value stays the same object."""
    handler = _HANDLERS.get(type(value)) or _handler_of(value)
    if handler is not None:
        yield _Held(value, handler.read(value), handler)
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _contents(tensor, depth)
    if depth < MAX_DEPTH:
        for each in elements(value):
            yield from _contents(each, depth + 1)


def _containers(value: Any, depth: int = 0) -> Iterator[_Held]:
    """Yield the containers in a value, which may have other elements later."""
    handler = _container_handler(value)
    if handler is not None:
        yield _Held(value, handler.read(value), handler)
        if depth < MAX_DEPTH:
            for each in elements(value):
                yield from _containers(each, depth + 1)


def elements(value: Any) -> list[Any]:
    """Return what is inside a container of any class, without running the user's code."""
    own = type(value)
    if issubclass(own, dict):
        return list(dict.values(value)) if dict.__len__(value) <= MAX_ELEMENTS else []
    if issubclass(own, threading.local):
        return list(local_names(value).values())
    if issubclass(own, ContextVar):
        return [held_by(value)]
    for kind in (list, tuple, deque):
        if issubclass(own, kind):
            return list(kind.__iter__(value)) if kind.__len__(value) <= MAX_ELEMENTS else []
    return []


def _container_handler(value: Any) -> _Handler | None:
    return next((h for kind, h in _BY_CLASS.items() if issubclass(type(value), kind)), None)


def _handler_of(value: Any) -> _Handler | None:
    container = _container_handler(value)
    if container is not None:
        return container
    if isinstance(value, torch.Tensor):
        return _TENSOR if not value.is_sparse and value.nbytes <= MAX_BYTES else None
    if isinstance(value, np.ndarray):
        fits = value.nbytes <= MAX_BYTES and value.flags.writeable and not value.dtype.hasobject
        return _ARRAY if fits else None
    if isinstance(value, random.Random):
        return _PYTHON_RANDOM
    return None


def _filled(kind: Any, extend: str) -> Callable[[Any, Any], None]:
    """Return a function that fills a container of a class, or of a derived one.

    It does not run the user's code.
    """

    def write(value: Any, before: Any) -> None:
        kind.clear(value)
        getattr(kind, extend)(value, before)

    return write


def local_names(value: threading.local) -> dict[str, Any]:
    """Return what a ``threading.local`` holds for this thread."""
    found: dict[str, Any] = threading.local.__getattribute__(value, "__dict__")
    return found


def _write_local(value: Any, before: Any) -> None:
    names = local_names(value)
    names.clear()
    names.update(before)


def _write_buffer(value: Any, before: Any) -> None:
    value[:] = before


def _write_context(value: ContextVar[Any], before: Any) -> None:
    if before is not MISSING:  # a ContextVar cannot be emptied again
        value.set(before)


def _shallow(one: Any, other: Any) -> bool:
    """Return whether two sequences hold the same objects; contents are compared separately."""
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


_TENSOR = _Handler(lambda value: value.detach().clone(), _write_tensor)
_ARRAY = _Handler(lambda value: value.copy(), _write_array)
_PYTHON_RANDOM = _Handler(lambda value: value.getstate(), lambda value, s: value.setstate(s))


def _write_numpy_generator(value: np.random.Generator, before: Any) -> None:
    value.bit_generator.state = before


_HANDLERS: Mapping[type, _Handler] = {
    torch.Generator: _Handler(
        lambda value: value.get_state().clone(), lambda value, state: value.set_state(state)
    ),
    np.random.Generator: _Handler(lambda value: value.bit_generator.state, _write_numpy_generator),
    np.random.RandomState: _Handler(
        lambda value: value.get_state(), lambda value, state: value.set_state(state)
    ),
}

_BY_CLASS: Mapping[type, _Handler] = {
    OrderedDict: _Handler(
        lambda value: dict(OrderedDict.items(value)),
        _filled(OrderedDict, "update"),
        _shallow_mapping,
    ),
    dict: _Handler(
        lambda value: dict(dict.items(value)), _filled(dict, "update"), _shallow_mapping
    ),
    list: _Handler(lambda value: list(list.__iter__(value)), _filled(list, "extend"), _shallow),
    deque: _Handler(lambda value: list(deque.__iter__(value)), _filled(deque, "extend"), _shallow),
    set: _Handler(lambda value: set(set.__iter__(value)), _filled(set, "update")),
    bytearray: _Handler(bytes, _write_buffer),
    array: _Handler(lambda value: value[:], _write_buffer),
    threading.local: _Handler(
        lambda value: dict(local_names(value)), _write_local, _shallow_mapping
    ),
    ContextVar: _Handler(held_by, _write_context, lambda a, b: a is b or same(a, b)),
}
"""The handler of a value, by its class or a base class of that."""
