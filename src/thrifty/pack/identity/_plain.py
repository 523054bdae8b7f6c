"""Plain immutable values as text."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any

import torch


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
