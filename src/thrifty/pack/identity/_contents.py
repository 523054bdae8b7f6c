"""Containers whose content counts, and objects without one."""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import multiprocessing.process
import os
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError

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


def neutral_name(value: Any) -> str | None:
    """Return the name of a value that changes no computation, such as a logger; None for others."""
    if is_a(value, logging.Logger):
        return str(value.name)
    if is_a(value, ModuleType):
        return str(value.__name__)
    if is_a(value, _NEUTRAL):
        return ""
    for stream in ("stdin", "stdout", "stderr"):
        if value is getattr(sys, stream) or value is getattr(sys, f"__{stream}__"):
            return stream
    return None


def why_no_content(value: Any) -> str:
    """Return why two such objects cannot be compared; empty if they can."""
    for kinds, what in _NO_CONTENT:
        if is_a(value, kinds):
            return f"is {what}"
    if is_iterator(value) and not is_own(type(value)):
        return "is an iterator"
    return ""


def is_iterator(value: Any) -> bool:
    """Return whether a value can be iterated over only once."""
    return hasattr(type(value), "__next__")


def no_content(path: str, value: Any, reason: str) -> TaskError:
    """Return the error for a value by which a task cannot be identified."""
    return TaskError(
        f"{path} {reason} ({type(value).__name__}), so thrifty cannot tell whether two studies "
        "train the same: keep what it is made from instead (a path, a seed, a list), or define "
        f"`__thrifty_identity__(self)` on the task or on the class of the object; it returns plain "
        "data that is used instead, such as a `version` that you change by hand"
    )


_NEUTRAL = (
    logging.Handler, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()),
    threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, threading.local,
    weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    weakref.finalize, type(os.environ),
)  # fmt: skip

_NO_CONTENT: tuple[tuple[Any, str], ...] = (
    (io.IOBase, "an open file"),
    (socket.socket, "a socket"),
    ((types.GeneratorType, types.AsyncGeneratorType), "a generator"),
    (types.CoroutineType, "a coroutine"),
    (threading.Thread, "a thread"),
    ((subprocess.Popen, multiprocessing.process.BaseProcess), "a process"),
    (Executor, "a pool of workers"),
    (Future, "a result that is being computed"),
    ((types.FrameType, types.TracebackType), "a frame of running code"),
)

BUILT_IN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType,
)  # fmt: skip
"""Types of compiled functions and descriptors, which their names identify."""
