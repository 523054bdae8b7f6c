"""Descriptions of user objects as text that is equal in every process, for a task's identity."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch


Describe = Callable[[Any], str]
Otherwise = Callable[[Any, Describe], str]
"""Describes a value that is neither code nor plain, given the function for its parts."""

_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def by_shape(value: Any, describe: Describe) -> str:  # noqa: ARG001
    """Describe data by shape, because they may be large.

    If you change only the values of data, change ``version``, too.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)}:{value.dtype}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def described(value: Any, *, otherwise: Otherwise = by_shape) -> str:
    """Describe a value in text that does not change from run to run.

    A function is described by its code, its captured values, and the user's own classes and
    functions that it names. Libraries are described by their names only.

    >>> described(lambda hp: hp.width) == described(lambda hp: hp.width)
    True
    >>> described(lambda hp: hp.width) == described(lambda hp: hp.depth)
    False
    """
    return _Description(otherwise).of(value)


class _Description:
    def __init__(self, otherwise: Otherwise) -> None:
        self._otherwise = otherwise
        self._within: list[Callable[..., Any]] = []
        """Functions being described. A captured value may refer back to one of them."""

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, functools.partial):
            return f"partial({self.of((value.func, value.args, value.keywords))})"
        if inspect.ismethod(value):
            return f"method({self.of((value.__self__, value.__func__))})"
        if inspect.isfunction(value):
            return self._function(inspect.unwrap(value))
        if isinstance(value, type):
            return _class(value)
        return self._collection(value)

    def _collection(self, value: Any) -> str:
        if isinstance(value, Mapping):
            items = sorted((repr(key), self.of(inside)) for key, inside in value.items())
            return f"{{{', '.join(f'{key}: {inside}' for key, inside in items)}}}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.of, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.of, value)))}}}"
        return self._otherwise(value, self.of)

    def _function(self, function: Callable[..., Any]) -> str:
        if function in self._within:
            return f"function number {self._within.index(function)}"
        plain: Any = function
        if not plain.__closure__ and not _source(plain):
            return f"{plain.__module__}.{plain.__qualname__}"
        self._within.append(function)
        code: CodeType = plain.__code__
        parts = [_code(code), self.of(plain.__defaults__), self.of(plain.__kwdefaults__)]
        parts += [self._captured(cell) for cell in plain.__closure__ or ()]
        parts += [f"{name}={text}" for name, text in _named(code, plain.__globals__)]
        self._within.pop()
        return f"function {_digest(*parts)}"

    def _captured(self, cell: Any) -> str:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return ""
        return self.of(value)


def _code(code: CodeType) -> str:
    inside = [_code(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return _digest(code.co_code.hex(), *code.co_names, *code.co_varnames, *inside)


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the user's own objects that code names, with descriptions.

    Classes and functions are described by their source, plain values by themselves.
    """
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, type):
            yield name, _class(value)
        elif inspect.isfunction(value):
            yield name, _source(value) or value.__qualname__
        elif isinstance(value, bool | int | float | str):
            yield name, repr(value)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _class(kind: type) -> str:
    sources = [text for base in kind.__mro__ if (text := _source(base))]
    return f"{kind.__module__}.{kind.__qualname__} {_digest(*sources)}"


def _source(thing: Any) -> str:
    """Return the source of a user's object; an empty text for a library's."""
    try:
        file = Path(inspect.getfile(thing)).resolve()
        if str(file).startswith(_LIBRARIES) or "site-packages" in file.parts:
            return ""
        return inspect.getsource(thing)
    except (OSError, TypeError):  # built in, or typed at a prompt
        members = vars(thing).items() if isinstance(thing, type) else [("", thing)]
        codes = [getattr(member, "__code__", None) for _, member in sorted(members, key=_name)]
        return _digest(*(_code(code) for code in codes if code is not None))


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
