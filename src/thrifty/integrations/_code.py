"""What a function or an option is, as text that is equal in every process: part of a task's identity."""

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


_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)


def described(value: Any) -> str:
    """A value in words that do not change from run to run.

    A function is its code, what that has captured, and the user's own classes and functions that it names; libraries
    are names only.

    >>> described(lambda hp: hp.width) == described(lambda hp: hp.width)
    True
    >>> described(lambda hp: hp.width) == described(lambda hp: hp.depth)
    False
    """
    if isinstance(value, functools.partial):
        return f"partial({described((value.func, value.args, value.keywords))})"
    if inspect.isfunction(value) or inspect.ismethod(value):
        return _function(value)
    if isinstance(value, type):
        return _class(value)
    if isinstance(value, Mapping):
        items = sorted((str(key), described(inside)) for key, inside in value.items())
        return f"{{{', '.join(f'{key}: {inside}' for key, inside in items)}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(described(item) for item in value)})"
    if isinstance(value, torch.Tensor | np.ndarray):
        # data may be large; who changes only their values says so with ``version``
        return f"{type(value).__name__}{tuple(value.shape)}:{value.dtype}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _function(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(getattr(function, "__func__", function))
    code: CodeType = plain.__code__
    parts = [_code(code), described(plain.__defaults__), described(plain.__kwdefaults__)]
    parts += [_captured(cell) for cell in plain.__closure__ or ()]
    parts += [f"{name}={text}" for name, text in _named(code, plain.__globals__)]
    return f"function {_digest(*parts)}"


def _captured(cell: Any) -> str:
    try:
        value = cell.cell_contents
    except ValueError:  # not bound yet
        return ""
    # its own captures may lead back to the function
    return _code(value.__code__) if inspect.isfunction(value) else described(value)


def _code(code: CodeType) -> str:
    inside = [
        _code(c) if isinstance(c, CodeType) else described(_ordered(c)) for c in code.co_consts
    ]
    return _digest(code.co_code.hex(), *code.co_names, *code.co_varnames, *inside)


def _ordered(constant: Any) -> Any:
    """``x in {"a", "b"}`` has a frozen set, whose order differs between processes."""
    return sorted(constant, key=repr) if isinstance(constant, frozenset) else constant


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What code mentions of the user's own: classes and functions by their source, plain values by themselves."""
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
    """The source of something of the user's; nothing for a library's."""
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
