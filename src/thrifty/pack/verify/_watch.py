"""Values that recorded code reads and that may change between steps: closures, globals, attributes, ``requires_grad``.

A recorded program has them built in. They are compared with what they were, so that a change is noticed before the next
step and not only by the next check. The model to read is the guards of ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thrifty.pack.identity import MISSING, Place, is_iterator, reach


MAX_ELEMENTS = 256
"""A container with more elements is compared by its length, and by some of its elements."""
MAX_DEPTH = 4

_MAKERS = ("data", "model", "optimizer")
"""Methods of a task that run before training, and may keep caches."""

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that is not what it was.

    Attributes:
        name: Where it stands, for people.
        is_own: Whether it is an attribute of one of the watched objects or of their modules, and not of the code
            that all objects share.
    """

    name: str
    is_own: bool


class Watch:
    """The values that some code reads, and whether one of them has changed since.

    Args:
        roots: The code and the objects to watch, by name: a loss, a task, a module.
        ignored: Attributes that are followed in another way, as pairs of their object and their name.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, ignored: Iterable[tuple[object, str]] = ()
    ) -> None:
        skipped = {(id(holder), name) for holder, name in ignored}
        models = [root for root in roots.values() if isinstance(root, torch.nn.Module)]
        self._own = {id(root) for root in roots.values()}
        self._own |= {id(module) for model in models for module in model.modules()}
        self._fast: list[tuple[dict[str, Any], str, Any, Place]] = []
        self._slow: list[tuple[Place, Any]] = []
        self.unwatchable = ""
        """The name of something that is read and has no value to compare, such as an iterator; "" if there is none."""
        for place in _places(roots):
            if (id(place.holder), place.key) in skipped or _is_mode(place):
                continue
            value = place.get()
            namespace = _namespace(place)
            if namespace is not None and type(value) in _IMMUTABLE:
                self._fast.append((namespace, place.key, value, place))
            else:
                self._slow.append((place, token(value)))
                if is_iterator(value):
                    self.unwatchable = self.unwatchable or place.name
        self._tensors = [
            (f"{name}.{path}", module._parameters, key, parameter, parameter.requires_grad)
            for name, model in roots.items()
            if isinstance(model, torch.nn.Module)
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def changed(self, part: int = 0, parts: int = 1) -> Change | None:
        """A value that is not what it was; None if there is none.

        Args:
            part: Looks at one of several parts of the values, in rotation.
            parts: How many parts there are.
        """
        for namespace, key, value, place in self._fast[part::parts]:
            now = namespace.get(key, MISSING)
            if now is not value and not _same(now, value):
                return self._change(place)
        for name, parameters, key, parameter, trained in self._tensors[part::parts]:
            if parameters.get(key) is not parameter or parameter.requires_grad is not trained:
                return Change(name=f"{name}.{key}", is_own=True)
        for place, before in self._slow[part::parts]:
            if token(place.get()) != before:
                return self._change(place)
        return None

    def _change(self, place: Place) -> Change:
        return Change(name=place.name, is_own=id(place.holder) in self._own)


class Keeper:
    """Keeps what some code may change while it is tried out, and puts it back.

    Numbers, strings, containers and the attributes of objects of the user's own; tensors and modules are for others.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._places = [
            (place, place.get())
            for place in _places(roots)
            if place.kind in ("global", "closure", "class attribute", "attribute", "item")
        ]
        self._contents = [
            (value, copy(value))
            for _, value in self._places
            if type(value) in (list, dict, set, bytearray)
        ]

    def put_back(self) -> None:
        """Put everything back that is not what it was."""
        for container, before in self._contents:
            if type(container) is list or type(container) is bytearray:
                container[:] = before
            elif container != before:
                container.clear()
                container.update(before)
        for place, value in self._places:
            if place.get() is not value:
                place.set(value)


def _places(roots: Mapping[str, Any]) -> list[Place]:
    """What training steps and evaluations read; not what makes data, models and optimizers."""
    models = {n: root for n, root in roots.items() if isinstance(root, torch.nn.Module)}
    others = {n: root for n, root in roots.items() if n not in models}
    found = {
        (id(place.holder), place.key): place
        for places in (reach(others, without=_MAKERS).places, reach(models).places)
        for place in places
    }
    return list(found.values())


def token(value: Any, depth: int = 0) -> Any:
    """A stand-in for a value that differs if the value has changed, as far as can be seen cheaply.

    >>> numbers = [1, 2]
    >>> before = token(numbers)
    >>> numbers.append(3)
    >>> token(numbers) == before
    False
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return (kind, value)
    make = _TOKENS.get(kind)
    if make is not None and depth < MAX_DEPTH:
        return make(value, depth)
    if isinstance(value, torch.Tensor):
        return (id(value), value._version, value.requires_grad)
    if isinstance(value, torch.Generator):
        return (id(value), bytes(value.get_state().numpy()))
    if isinstance(value, np.random.Generator):
        return (id(value), repr(value.bit_generator.state))
    return (kind, id(value))


def _sequence(value: Any, depth: int) -> Any:
    some = value if len(value) <= MAX_ELEMENTS else value[:: len(value) // MAX_ELEMENTS]
    return (type(value), len(value), *(token(each, depth + 1) for each in some))


def _mapping(value: Any, depth: int) -> Any:
    if len(value) > MAX_ELEMENTS:
        return (dict, id(value), len(value))
    return (dict, *((token(k, depth), token(v, depth + 1)) for k, v in value.items()))


def _set(value: Any, depth: int) -> Any:  # noqa: ARG001 (the signature of all of them)
    return (set, id(value), len(value), *sorted(map(hash, value)))


def _array(value: Any, depth: int) -> Any:  # noqa: ARG001
    flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()
    some = flat if flat.size <= MAX_ELEMENTS else flat[:: flat.size // MAX_ELEMENTS]
    return (id(value), value.shape, some.tobytes())


_TOKENS: dict[type, Callable[[Any, int], Any]] = {
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    np.ndarray: _array,
}


def _namespace(place: Place) -> dict[str, Any] | None:
    """The dict that holds a value, where there is one."""
    if place.kind == "global" or place.kind == "item":
        return place.holder if type(place.holder) is dict else None
    if place.kind == "attribute":
        found = getattr(place.holder, "__dict__", None)
        return found if type(found) is dict else None
    return None


def _is_mode(place: Place) -> bool:
    """Whether it is a module's ``training``, which training loops set at each step."""
    return place.key == "training" and isinstance(place.holder, torch.nn.Module)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
