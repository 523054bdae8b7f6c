"""The contents of a value: elements of containers, and what objects wrap."""

from __future__ import annotations

import contextvars
import functools
import logging
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ._own import is_own
from ._place import MISSING


CACHED = type(functools.lru_cache(len))

PLAIN = frozenset({
    bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented),
    range, slice, torch.dtype, torch.device, torch.Size, torch.Tensor, torch.nn.Parameter,
})  # fmt: skip
"""Types whose values contain no code."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
CONTAINERS = (dict, MappingProxyType, *_SEQUENCES)

NEUTRAL = (
    torch.Tensor, np.ndarray, np.generic, np.dtype, logging.Logger, logging.Handler, weakref.ref,
    types.GeneratorType, types.CoroutineType, types.FrameType, types.TracebackType, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType,
)  # fmt: skip
"""Types whose values are not searched."""


def is_a(value: Any, kinds: Any) -> bool:
    """Do what ``isinstance`` does, but never consult a ``__class__`` that the user has defined."""
    return issubclass(type(value), kinds)


def elements(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a container and how to write them after its name.

    Subclasses are read as their built-in base class, so that none of the user's methods runs.
    """
    if is_a(container, dict):
        yield from _items(list(dict.items(container)))
    elif is_a(container, MappingProxyType):
        yield from _items(list(container.items()))
    elif is_a(container, np.ndarray):
        yield from ((f"[{i}]", each) for i, each in enumerate(container.reshape(-1).tolist()))
    else:
        kind: Any = next(each for each in _SEQUENCES if is_a(container, each))
        for index, each in enumerate(list(kind.__iter__(container))):
            yield f"[{index}]", each
    if is_a(container, defaultdict):
        yield " default", container.default_factory


def _items(items: list[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, value in items:
        yield " key", key
        yield f"[{short(key)}]", value


def inside_of(value: Any) -> list[Any]:
    """Return the objects inside an object that only wraps a callable."""
    if is_a(value, MethodType):
        return [value.__func__, value.__self__]
    if is_a(value, functools.partial | functools.partialmethod):
        return [value.func, value.args, value.keywords]
    if is_a(value, staticmethod | classmethod):
        return [value.__func__]
    if is_a(value, property):
        return [each for each in (value.fget, value.fset, value.fdel) if each is not None]
    if is_a(value, functools.cached_property):
        return [value.func]
    if is_a(value, CACHED):
        return [value.__wrapped__]
    if is_a(value, types.BuiltinMethodType) and not is_a(value.__self__, ModuleType):
        return [value.__self__]
    if is_a(value, contextvars.ContextVar):
        held = held_by(value)
        return [] if held is MISSING else [held]
    inner = compiled_from(value)
    return [] if inner is None else [inner]


def held_by(variable: contextvars.ContextVar[Any]) -> Any:
    """Return a context variable's value in this context, or its default; else ``MISSING``."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def compiled_from(value: Any) -> FunctionType | None:
    """Return the function from which a compiler such as Numba made a callable; None if none did."""
    if not callable(value) or is_own(type(value)):
        return None
    for name in ("py_func", "__wrapped__", "_torchdynamo_inline"):
        inner = getattr(value, name, None)
        if is_a(inner, FunctionType):
            return inner
    return None


def short(key: Any) -> str:
    """Return a short text for a key of a container."""
    text = repr(key) if isinstance(key, str | int | float | bool | type(None)) else "..."
    return text if len(text) <= 40 else f"{text[:37]}..."
