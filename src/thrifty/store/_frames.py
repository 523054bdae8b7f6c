"""Conversion of rows to data frames of pandas or polars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from thrifty.core import (
    UsageError,
    require,
)


FrameBackend = Literal["pandas", "polars"]

_EXTRAS = {"pandas": "dataframe", "polars": "polars"}


def frame(rows: Sequence[Mapping[str, Any]], *, backend: FrameBackend = "pandas") -> Any:
    """Return a data frame of rows that all have the same keys.

    In polars each column has one type, so a column of mixed types or of schedules becomes text.
    pandas stores the objects themselves.

    Raises:
        MissingExtraError: The library is not installed.
        UsageError: ``backend`` is not a supported library.
    """
    if backend not in _EXTRAS:
        raise UsageError(f"backend is {backend!r}; it is one of 'pandas', 'polars'")
    library = require(backend, extra=_EXTRAS[backend])
    return library.DataFrame([dict(r) for r in rows] if backend == "pandas" else columns(rows))


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of rows, each of one type (number, bool or text); None if missing.

    >>> columns([{"lr": 1, "net": "small"}, {"lr": 0.5, "net": None}, {"lr": None, "net": 3}])
    {'lr': [1.0, 0.5, None], 'net': ['small', None, '3']}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _of_one_type([row.get(name) for row in rows]) for name in names}


def _of_one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return values
    if kinds == {int, float}:
        return _each(float, values)
    return _each(str, values)


def _each(kind: type, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else kind(value) for value in values]
