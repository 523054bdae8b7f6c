"""Small parts of an identity: plain values, names and versions as text; elements of containers.

Also, which objects have no content that could be compared, such as an open file.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import gc
import hashlib
import importlib.metadata
import io
import itertools
import logging
import multiprocessing.process
import operator
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import types
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError

from ._arrays import hooks_of
from ._own import functions_of, import_name, is_operator, is_own, is_own_module, module_name
from ._place import MISSING, vars_of


def digest(*parts: str | bytes) -> str:
    """Return a digest of some parts in order, which also depends on where each part ends.

    >>> digest("a", "b") == digest("ab")
    False
    """
    out = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out.update(b"%d:" % len(data))
        out.update(data)
    return out.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names as seen from the module ``home``."""

    home: str

    def label(self, module: str, name: str) -> str:
        """Return a name in a module: ``"helpers.scale"``, or ``"scale"`` in the home module."""
        module = import_name(module)
        return name if module in (self.home, "__main__") else f"{module}.{name}"

    def of(self, thing: Any) -> str:
        """Return the name of a function or a class, as it states it itself.

        For installed packages, modules whose names begin with an underscore are left out.
        """
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        if isinstance(thing, type):
            module = module_name(thing)
        else:
            module = getattr(thing, "__module__", None) or "__main__"
        return self.label(module if is_own_module(module) else _public(module), name)

    def of_code(self, function: FunctionType) -> str:
        """Return the name of a function as it was compiled, ignoring ``functools.wraps``."""
        return self.label(_public(module_name(function)), function.__code__.co_qualname)


def _public(module: str) -> str:
    if module.partition(".")[0] == "thrifty":
        return "thrifty"  # its objects may move between its modules
    return ".".join(part for part in module.split(".") if not part.startswith("_")) or module


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages, by the names of their distributions.

    Args:
        packages: The names by which they are imported, such as ``"sklearn"``.

    >>> list(versions(["torch"]))
    ['torch']
    """
    out: dict[str, str] = {}
    for package in sorted(set(packages)):
        out.update(_versions_of(package))
    return out


@functools.cache
def _versions_of(package: str) -> dict[str, str]:
    usual = _USUAL.get(package, package)  # most distributions are named like their package
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {usual: _plain(importlib.metadata.version(usual))}
    names = sorted(set(_distributions().get(package, ())))
    if not names:
        return {package: "unknown"}
    return {name: _plain(importlib.metadata.version(name)) for name in names}


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {k: list(v) for k, v in importlib.metadata.packages_distributions().items()}


def _plain(version: str) -> str:
    """Drop a build's device name: it changes no result that thrifty guarantees.

    >>> _plain("2.6.0+cu124"), _plain("1.0+mine")
    ('2.6.0', '1.0+mine')
    """
    return re.sub(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)$", "", version)


_USUAL = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Well-known packages with other distribution names.

Looking them up takes a second where many packages are installed.
"""


def _text(value: str) -> str:
    return value


def _pattern(value: re.Pattern[Any]) -> str:
    return f"{value.pattern!a} {value.flags}"


def _moment(value: datetime.datetime | datetime.time) -> str:
    zone = getattr(value.tzinfo, "key", "")  # its `repr` may contain an address
    return f"{value.isoformat()} {value.fold} {zone}"


def _path(value: pathlib.PurePath) -> str:
    return value.as_posix()


_BY_REPR = (
    bool, int, float, complex, type(None), type(...), type(NotImplemented), range,
    decimal.Decimal, fractions.Fraction, uuid.UUID, datetime.date, datetime.timedelta,
    datetime.timezone, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip

PLAIN_WRITERS: dict[type, Callable[[Any], str | bytes]] = {
    **dict.fromkeys(_BY_REPR, repr),
    str: _text,
    bytes: bytes,
    bytearray: bytes,
    re.Pattern: _pattern,
    datetime.datetime: _moment,
    datetime.time: _moment,
    pathlib.PosixPath: _path,
    pathlib.WindowsPath: _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
}
"""How to write a value of exactly this type; values of one type are equal if their texts are."""

LISTABLE = frozenset({bool, int, float, str, type(None)})
"""Types whose values ``ascii`` tells apart, also inside a list, a tuple or a dict."""

SUBCLASSED = (int, float, complex, str, bytes, bytearray)
"""Types that users subclass; a value of a subclass is written as one of these, plus more."""


def short_text(value: Any) -> str | None:
    """Return a plain value in readable form if it is short; no two values have the same text.

    >>> short_text(0.1), short_text("a" * 100)
    ('0.1', None)
    """
    if type(value) not in LISTABLE:
        return None
    text = ascii(value)
    return text if len(text) <= 40 else None


CACHED = type(functools.lru_cache(len))

_PLAIN = frozenset({
    bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented),
    range, slice, torch.dtype, torch.device, torch.Size,
})  # fmt: skip
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(value: Any) -> bool:
    """Return whether a value contains no code: a number, a text, a tensor without hooks."""
    kind = type(value)
    return kind in _PLAIN or (
        kind in _TENSORS and not vars_of(value) and not any(hooks_of(value).values())
    )


WEAK_CONTAINERS = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
_KEYED = (dict, MappingProxyType, *WEAK_CONTAINERS[:2], threading.local)
_SETS = (set, frozenset, weakref.WeakSet)
_SEQUENCES = (list, tuple, deque)
CONTAINERS = (*_KEYED, *_SETS, *_SEQUENCES)


class Unsearched:
    """A record of the library about the user's code, which no search enters.

    It holds whole modules, so a search would find code that the user's objects do not call.
    """


NEUTRAL = (
    Unsearched, torch.Tensor, np.ndarray, np.generic, np.dtype, logging.Logger, logging.Handler,
    weakref.ref, types.GeneratorType, types.CoroutineType, types.FrameType, types.TracebackType,
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias,
    types.UnionType,
)  # fmt: skip
"""Types whose values are not searched."""


def is_a(value: Any, kinds: Any) -> bool:
    """Do what ``isinstance`` does, but never consult a ``__class__`` that the user has defined."""
    return issubclass(type(value), kinds)


def elements(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a container and how to write them after its name.

    Subclasses are read as their built-in base class, so that none of the user's methods runs.
    """
    items = items_of(container)
    if items is not None:
        for key, value in items:
            yield " key", key
            yield f"[{short(key)}]", value
    elif is_a(container, np.ndarray):
        yield from ((f"[{i}]", each) for i, each in enumerate(container.reshape(-1).tolist()))
    else:
        kind: Any = next(each for each in (*_SETS, *_SEQUENCES) if is_a(container, each))
        for index, each in enumerate(list(kind.__iter__(container))):
            yield f"[{index}]", each
    if is_a(container, defaultdict):
        yield " default", container.default_factory


def items_of(container: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a container that has keys; None for any other value.

    Those of a ``threading.local`` are what it holds for this thread, in the order of its names.
    """
    kind: Any = next((each for each in _KEYED if is_a(container, each)), None)
    if kind is None:
        return None
    if kind is threading.local:
        held = threading.local.__getattribute__(container, "__dict__")
        return sorted(held.items(), key=lambda item: str(item[0]))
    return list(kind.items(container))


def members_in(container: Any) -> list[Any] | None:
    """Return the elements of a set in no order; None for any other value."""
    kind: Any = next((each for each in _SETS if is_a(container, each)), None)
    return None if kind is None else list(kind.__iter__(container))


OF_WEAK_CONTAINERS = frozenset(itertools.chain(*(vars(kind()) for kind in WEAK_CONTAINERS)))
"""Attributes in which weak containers keep their references."""


def inside_of(value: Any) -> list[Any]:
    """Return the objects inside an object that only wraps a callable."""
    for kinds, inside in _INSIDE:
        if is_a(value, kinds):
            return [each for each in inside(value) if each is not None and each is not MISSING]
    if is_operator(value):
        return [functions_of(value)]
    inner = compiled_from(value)
    return [] if inner is None else [inner]


def callables_of(ufunc: np.ufunc) -> list[Any]:
    """Return the Python callable from which ``np.frompyfunc`` made a ufunc; empty for others.

    NumPy shows it only to the garbage collector.
    """
    return [each for each in gc.get_referents(ufunc) if callable(each)]


def parts_of_super(value: Any) -> tuple[Any, ...]:
    """Return the class and the object of a ``super()``, which passes on all other attributes."""
    return tuple(vars(super)[each].__get__(value) for each in ("__thisclass__", "__self__"))


_INSIDE: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (MethodType, lambda value: (value.__func__, value.__self__)),
    (
        functools.partial | functools.partialmethod,
        lambda value: (value.func, value.args, value.keywords),
    ),
    (staticmethod | classmethod, lambda value: (value.__func__,)),
    (property | enum.property, lambda value: (value.fget, value.fset, value.fdel)),
    (functools.cached_property, lambda value: (value.func,)),
    (CACHED, lambda value: (value.__wrapped__,)),
    (types.MethodWrapperType, lambda value: (value.__self__,)),
    (
        types.BuiltinMethodType,
        lambda value: () if is_a(value.__self__, ModuleType) else (value.__self__,),
    ),
    (contextvars.ContextVar, lambda value: (held_by(value),)),
    (np.ufunc, callables_of),
    (super, parts_of_super),
)
"""What is inside objects of some types."""


def is_of_a_package(ufunc: np.ufunc) -> bool:
    """Return whether an installed package has a ufunc under its name."""
    name = ufunc.__name__
    return vars(np).get(name) is ufunc or any(
        vars_of(module).get(name) is ufunc and not is_own_module(each)
        for each, module in list(sys.modules.items())
    )


def code_behind(reference: Any) -> Any:
    """Return the user's function, class or method that a reference leads to; None for others.

    Args:
        reference: A ``weakref.ref``, ``weakref.WeakMethod`` or ``weakref.finalize``.
    """
    target: Any = None
    if is_a(reference, weakref.finalize):
        held: Any = weakref.finalize.peek(reference)
        target = None if held is None else held[1]
    elif is_a(reference, weakref.WeakMethod):
        target = weakref.WeakMethod.__call__(reference)
    elif is_a(reference, weakref.ref):
        target = weakref.ref.__call__(reference)
    code = target.__func__ if is_a(target, MethodType) else target
    return target if is_a(code, type | FunctionType) and is_own(code) else None


def names_called_by(value: Any) -> frozenset[str]:
    """Return the attributes that an ``attrgetter`` or a ``methodcaller`` reads of its argument."""
    if not is_a(value, operator.attrgetter | operator.methodcaller):
        return frozenset()
    made, arguments = value.__reduce__()
    names = made.args if is_a(made, functools.partial) else arguments
    if is_a(value, operator.methodcaller):
        names = names[:1]
    return frozenset(part for name in names for part in name.split("."))


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
    if value is sys.modules:
        return "sys.modules"
    if is_a(value, weakref.WeakMethod) and code_behind(value) is not None:
        return None
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


def unreadable(path: str) -> TaskError:
    """Return the error for a ufunc that was compiled from code which it does not show."""
    return TaskError(
        f"{path} is a NumPy ufunc whose code thrifty cannot read, so it cannot tell whether two "
        "studies train the same: write a plain function, or make it with `np.vectorize`"
    )


_NEUTRAL = (
    logging.Handler, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()),
    threading.Condition, threading.Event, threading.Semaphore, threading.Barrier,
    weakref.ref, weakref.finalize, type(os.environ),
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
