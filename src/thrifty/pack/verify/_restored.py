"""Comparison of a restored trial with the live one after the same step.

It shows whether a checkpoint holds the whole state of a trial."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from thrifty.pack._frozen import snapshot
from thrifty.pack.identity import parts_of

from ._compare import same
from ._held_values import Part, holds, note_of, parts_held, path_of, position_of
from ._stand_ins import (
    ARCHIVES,
    UNREAD,
    are_containers,
    array_content,
    elements_of,
    is_listed,
    is_whole,
    items_of,
    opaque_content,
    plain_digest,
    size_of,
    tensor_content,
)


FIRST_BATCH = "the first batch of the epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The results of one step and one evaluation of a trial.

    Attributes:
        loss: The loss of the step.
        batch: A stand-in for the batches of step and evaluation.
        tensors: The model's state afterwards, by name.
        moments: The optimizer's state afterwards, by parameter name.
        metrics: The metrics of the first validation batch after the step.
    """

    loss: torch.Tensor
    batch: Any
    tensors: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Any]


def probes_differ(live: Probe, restored: Probe, *, after: str = "the next step") -> str:
    """Return what differs between two probes, in words; "" if they are equal to the last bit.

    Args:
        live: The probe of the live trial.
        restored: The probe of the restored trial.
        after: What both trials have done, in words.
    """
    if not same(live.batch, restored.batch):
        return FIRST_BATCH
    if not same(live.loss, restored.loss):
        return f"the loss of {after}"
    for name in dict.fromkeys((*live.tensors, *restored.tensors)):
        if not same(live.tensors.get(name), restored.tensors.get(name)):
            return f"{name!r} after {after}"
    for name in dict.fromkeys((*live.moments, *restored.moments)):
        if not same(live.moments.get(name), restored.moments.get(name)):
            return f"the optimizer's state of {name!r} after {after}"
    for name in dict.fromkeys((*live.metrics, *restored.metrics)):
        if not same(live.metrics.get(name), restored.metrics.get(name)):
            return f"the metric {name!r}"
    return ""


def outside_of_state(
    live: Mapping[str, Any], restored: Mapping[str, Any], *, meant: Collection[str] = ()
) -> list[str]:
    """Return the names of the attributes that differ between a live trial and a restored one.

    Slots count as attributes. Of the user's own functions that attributes hold, closures, defaults
    and attributes are compared (``"self.f.n (closure)"``); of iterators and the user's own
    generators the positions.

    Args:
        live: Tasks, modules and the like of the live trial, by name.
        restored: The same objects of the restored trial.
        meant: Names of attributes that are meant not to be part of the state.
    """
    found = []
    seen: set[int] = set()
    for name, mine, theirs in _pairs(live, restored):
        found += _attributes_apart(name, mine, theirs, meant=meant, seen=seen)
        if isinstance(mine, torch.nn.Module) and isinstance(theirs, torch.nn.Module):
            found += [
                f"{name}.{key} (a buffer that is not persistent)"
                for key in sorted(mine._non_persistent_buffers_set - set(meant))
                if not same(mine._buffers.get(key), theirs._buffers.get(key))
            ]
    return found


def contents_of(objects: Mapping[str, Any], *, depth: int | None = None) -> dict[str, Any]:
    """Return stand-ins for the attributes of objects, by the names of ``outside_of_state``.

    ``is_unread`` tells those that do not stand for the whole content.

    Args:
        objects: Tasks, modules and the like, by name.
        depth: How many objects within objects are looked at (default: as many as are compared).
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    deepest = _MAX_DEPTH if depth is None else depth
    for name, one, _ in _pairs(objects, objects):
        _note_contents(name, one, found=found, seen=seen, depth=deepest)
    return found


def _note_contents(
    name: str, one: Any, *, found: dict[str, Any], seen: set[int], depth: int
) -> None:
    if id(one) in seen:
        return
    seen.add(id(one))
    left_out = _kept_by_torch() if isinstance(one, torch.optim.Optimizer) else _NOT_STATE
    for key, value in parts_held(one).items():
        if key in left_out or str(key).endswith("_hooks"):
            continue
        path = path_of(name, key)
        content, inside = content_of(value), _objects(value, value)
        if inside and (depth <= 0 or len(seen) >= _MAX_OBJECTS):
            content, inside = (content, UNREAD), []
        found[path + note_of(key)] = content
        for where, each, _ in inside:
            _note_contents(f"{path}{where}", each, found=found, seen=seen, depth=depth - 1)


def how_far_apart(one: Probe, other: Probe) -> float:
    """Return the largest relative difference of two probes; infinite if they cannot be compared.

    >>> a = Probe(loss=torch.tensor(2.0), batch=None, tensors={}, moments={}, metrics={"loss": 2.0})
    >>> b = Probe(loss=torch.tensor(2.0), batch=None, tensors={}, moments={}, metrics={"loss": 1.0})
    >>> how_far_apart(a, a), how_far_apart(a, b)
    (0.0, 0.5)
    """
    if not same(one.batch, other.batch):
        return math.inf
    return max(
        _apart(one.loss, other.loss),
        _apart(one.tensors, other.tensors),
        _apart(one.moments, other.moments),
        _apart(one.metrics, other.metrics),
    )


def _apart(one: Any, other: Any) -> float:
    if same(one, other):
        return 0.0
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return max(_apart(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout != other.layout:
            return math.inf
        if one.layout != torch.strided:
            pairs = zip(parts_of(one), parts_of(other), strict=True)
            return max(_apart(*pair) for pair in pairs)
    try:
        first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
        scale = torch.maximum(first.abs().max(), second.abs().max())
        found = float((first - second).abs().max() / scale)
    except (RuntimeError, TypeError, ValueError):  # not numbers, or shapes that differ
        return math.inf
    return found if math.isfinite(found) else math.inf


def stand_in(batch: Any) -> Any:
    """Return a copy of the tensors of a batch, to compare with another one."""
    if isinstance(batch, torch.Tensor):
        return snapshot(batch)
    if isinstance(batch, Mapping):
        return {key: stand_in(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [stand_in(value) for value in batch]
    return batch if isinstance(batch, str | int | float) else None


def _pairs(live: Mapping[str, Any], restored: Mapping[str, Any]) -> Sequence[tuple[str, Any, Any]]:
    """Return objects that correspond to each other: each root, and each module in it."""
    out: list[tuple[str, Any, Any]] = []
    for name, mine in live.items():
        theirs = restored[name]
        out.append((name, mine, theirs))
        if isinstance(mine, torch.nn.Module) and isinstance(theirs, torch.nn.Module):
            others = dict(theirs.named_modules())
            out += [
                (f"{name}.{path}", module, others[path])
                for path, module in mine.named_modules()
                if path and path in others
            ]
    return out


def _attributes_apart(
    name: str, mine: Any, theirs: Any, *, meant: Collection[str], seen: set[int], depth: int = 0
) -> list[str]:
    """Return the attributes that differ between two objects, and between objects within them."""
    if mine is theirs or id(mine) in seen:
        return []
    seen.add(id(mine))
    inside, other = parts_held(mine), parts_held(theirs)
    left_out = _kept_by_torch() if isinstance(mine, torch.optim.Optimizer) else _NOT_STATE
    found: list[str] = []
    for key in dict.fromkeys((*inside, *other)):
        if key in left_out or _plain_name(key) in meant or str(key).endswith("_hooks"):
            continue
        value, its = inside.get(key), other.get(key)
        path = path_of(name, key)
        if content_of(value) != content_of(its):
            found.append(path + note_of(key))
        elif depth < _MAX_DEPTH and len(seen) < _MAX_OBJECTS:
            for where, one, two in _objects(value, its):
                found += _attributes_apart(
                    f"{path}{where}", one, two, meant=meant, seen=seen, depth=depth + 1
                )
    return found


def _plain_name(key: Any) -> Any:
    return key.name if type(key) is Part else key


def _objects(one: Any, other: Any, depth: int = 0) -> list[tuple[str, Any, Any]]:
    """Return objects with parts within two equal attributes: the values or their elements.

    Each comes after what its name adds to the attribute's.
    """
    kind = type(one)
    if kind is not type(other) or kind in _PLAIN:
        return []
    pairs: list[tuple[str, Any, Any]] = []
    deeper: list[tuple[str, Any, Any]] = []
    if is_listed(kind) and plain_digest(one) is None:
        both = zip(elements_of(one, _MAX_OBJECTS), elements_of(other, _MAX_OBJECTS), strict=False)
        pairs = [(f"[{number}]", *pair) for number, pair in enumerate(both)]
        if depth < _MAX_NESTED:
            deeper = [
                (f"{where}{inner}", a, b)
                for where, mine, theirs in pairs
                if type(mine) in _PLAIN_CONTAINERS
                for inner, a, b in _objects(mine, theirs, depth + 1)
            ]
    if kind not in _PLAIN_CONTAINERS:
        pairs.append(("", one, other))
    return deeper + [
        (where, *_owners(a, b))
        for where, a, b in pairs
        if type(a) is type(b) and type(a) not in _PLAIN and _is_walked(*_owners(a, b))
    ]


def _owners(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the objects that two bound methods belong to; other objects as they are."""
    if type(one) is MethodType:
        return one.__self__, other.__self__
    return one, other


def _is_walked(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or isinstance(one, _LOOKED_AT_ELSEWHERE):
        return False
    return holds(one) and not is_whole(one)


def content_of(value: Any, depth: int = 0) -> Any:
    """Return a stand-in for the content of a value; equal for all that cannot be compared."""
    kind = type(value)
    if kind in _PLAIN:
        return (kind.__name__, repr(value))
    if isinstance(value, torch.Tensor):
        return tensor_content(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return array_content(value)
    if are_containers(kind):
        return _of_container(value, depth) if depth < _MAX_NESTED else UNREAD
    if isinstance(value, bool | int | float | complex | str | bytes | bytearray | range):
        return (kind.__name__, repr(value))
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), content_of(value.reshape(-1).tolist(), depth + 1))
    if isinstance(value, np.generic):
        return (str(value.dtype), repr(value))
    state = _generator_state(value)
    if state is not None:
        return repr(state)
    return _of_object(value, depth) if depth < _MAX_NESTED else UNREAD


def _of_object(value: Any, depth: int) -> Any:
    """Return a stand-in for a function, an iterator or what compiled code keeps in an object.

    The result is None for any other object: it differs from others only in identity, and its own
    attributes are compared separately.
    """
    kind = type(value)
    if kind is FunctionType:
        return (value.__code__.co_qualname, value.__code__.co_firstlineno)
    if kind is MethodType:
        return content_of(value.__func__, depth + 1)
    if kind is BuiltinMethodType or kind is MethodWrapperType:
        owner = None if isinstance(value.__self__, ModuleType) else value.__self__
        return (value.__qualname__, content_of(owner, depth + 1))
    if isinstance(value, partial):
        return content_of(value.func, depth + 1)
    position = position_of(value)
    if position is None:
        return None if isinstance(value, _LOOKED_AT_ELSEWHERE) else opaque_content(value)
    return (kind.__name__, [content_of(each, depth + 1) for each in position])


def _generator_state(value: Any) -> Any:
    """Return the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return [part.tolist() if hasattr(part, "tolist") else part for part in value.get_state()]
    return value.getstate() if isinstance(value, random.Random) else None


def _of_container(value: Any, depth: int) -> Any:
    kind = type(value)
    size = size_of(value)
    if issubclass(kind, dict):
        items = items_of(value, _MAX_ITEMS)
        pairs = [(_key(k, depth), content_of(v, depth + 1)) for k, v in items]
        return [size, *pairs, *([(REST, _whole(value))] if size > _MAX_ITEMS else ())]
    # tuples, as only stand-ins of mappings are lists: these may be memos
    if is_listed(kind):
        if size > _MAX_ITEMS:
            whole = _whole(value)
            if whole is not UNREAD:
                return (size, whole)
        few = [content_of(each, depth + 1) for each in elements_of(value, _MAX_ITEMS)]
        return (size, *few, *((UNREAD,) if size > _MAX_ITEMS else ()))
    # a set has no order
    if size > _MAX_SIZE:
        return (size, UNREAD)
    return (size, *sorted(repr(_key(each, depth)) for each in elements_of(value, size)))


def _whole(container: Any) -> Any:
    digest = plain_digest(container)
    return UNREAD if digest is None else digest


def _key(value: Any, depth: int) -> Any:
    """Return a key's content, without what only identity distinguishes, such as a parameter."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    return content_of(value, depth + 1)


REST = "the other items"
"""A key that stands for all items of a large mapping."""

_PLAIN_CONTAINERS = (list, tuple, dict)

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types of values that have no parts."""

_NOT_STATE = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training",
    "_backward_hooks", "_forward_hooks", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
})  # fmt: skip
"""Attributes that every module has, and those that are state anyway."""


@functools.cache  # not computed at import: the first optimizer imports torch's compiler
def _kept_by_torch() -> frozenset[str]:
    """Return the attributes of every optimizer: state, options, hooks and data for profilers."""
    return frozenset(vars(torch.optim.Optimizer([torch.nn.Parameter(torch.empty(0))], {})))


_LOOKED_AT_ELSEWHERE = (
    torch.Tensor, torch.nn.Module, type, ModuleType, logging.Logger, WeakSet, *ARCHIVES,
)  # fmt: skip
"""Types that are compared elsewhere, or not at all.

Modules are compared in pairs of their own, tensors by their content.
"""

_MAX_NESTED = 8
"""How deep containers and iterators within one attribute are compared."""

_MAX_ITEMS = 256
_MAX_SIZE = 4096
"""How many elements of a container are compared unless all are plain; how large a set may be."""

_MAX_DEPTH = 8
_MAX_OBJECTS = 1000
"""How deep objects in attributes are compared, and how many of them. The rest is unread."""
