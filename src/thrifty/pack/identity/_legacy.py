"""The identity of a task in databases up to version 4, needed to recognise their studies.

It covers the source of the class and its bases, and attributes by ``repr``. No new plan uses it.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import inspect
import sys
from abc import ABC
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any


_ASKED = contextvars.ContextVar("thrifty_legacy_identity", default=False)


def is_legacy_asked() -> bool:
    """Return whether ``identity`` is called to recognise an old study."""
    return _ASKED.get()


@contextlib.contextmanager
def asking_legacy() -> Iterator[None]:
    """Make ``identity`` return what it did up to version 4; a user's override sees this as well."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def legacy_identity(task: Any) -> Mapping[str, str]:
    """Return the class, the source of it and its bases, its attributes and its version."""
    kind = type(task)
    return {
        "class": f"{_module_of(kind)}.{kind.__qualname__}",
        "source": _source_digest(kind),
        "attributes": repr(sorted((k, repr(v)) for k, v in vars(task).items())),
        "version": task.version,
    }


def _module_of(kind: type) -> str:
    """Return the module of a class; for the running script, the name that would import it."""
    if kind.__module__ != "__main__":
        return kind.__module__
    script = Path(getattr(sys.modules["__main__"], "__file__", ""))
    return script.stem if script.is_file() else "__main__"


def _source_digest(kind: type) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for base in kind.__mro__:
        if base.__module__.startswith("thrifty.") or base in (object, ABC):
            continue
        try:
            digest.update(inspect.getsource(base).encode())
        except (OSError, TypeError):  # typed at a prompt: use the compiled code
            for name, member in sorted(vars(base).items()):
                digest.update(name.encode() + _compiled(member) if name not in _NOT_CODE else b"")
    return digest.hexdigest()


_NOT_CODE = frozenset({
    "__abstractmethods__", "__dict__", "__doc__", "__module__", "__slotnames__", "__weakref__",
    "_abc_impl",
})  # fmt: skip
"""What Python itself adds to a class, in part only when the class is first pickled."""


def _compiled(member: Any) -> bytes:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    code = getattr(function, "__code__", None)
    return repr(member).encode() if code is None else _code(code)


def _code(code: CodeType) -> bytes:
    """Return the instructions with the names and constants that they refer to."""
    constants = [_constant(each) for each in code.co_consts]
    return b"\0".join((code.co_code, repr(code.co_names).encode(), *constants))


def _constant(value: Any) -> bytes:
    if isinstance(value, CodeType):
        return _code(value)
    # a set's order differs from process to process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()
