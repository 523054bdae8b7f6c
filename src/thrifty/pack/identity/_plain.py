"""Plain values, names and packages as text, and digests of it."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import functools
import hashlib
import importlib.metadata
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ._own import import_name, is_own_module, module_name


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
