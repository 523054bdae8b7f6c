"""What trials can be sorted by."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ColumnElement, case, func

from thrifty.core import UsageError
from thrifty.store import _schema as schema


Order = Literal["asc", "desc"]
COLUMNS = ("number", "state", "value", "reached", "target", "violation")
"""What trials can be sorted by, besides their hyper-parameters."""

_t = schema.trials


def sortable(sort: str) -> bool:
    """Whether trials can be sorted by this: one of ``COLUMNS``, or a hyper-parameter whose name fits into a statement.

    >>> sortable("value"), sortable("param:lr"), sortable("lr"), sortable('param:"')
    (True, True, False, False)
    """
    kind, _, name = sort.partition(":")
    return sort in COLUMNS or (kind == "param" and name != "" and not {'"', "\0"} & set(name))


def sort_keys(sort: str, *, dialect: str) -> list[ColumnElement[Any]]:
    """The same in SQL.

    Raises:
        UsageError: an unknown column, or a name that no statement can hold.
    """
    if sort in COLUMNS:
        return [_t.c[sort]]
    if not sortable(sort):
        raise UsageError(
            f"cannot sort trials by {sort!r}; use one of {', '.join(COLUMNS)} or param:NAME"
        )
    name = sort.removeprefix("param:")
    if dialect == "sqlite":
        # numbers as numbers, and before texts
        return [func.json_extract(_t.c.config, f'$."{name}"')]
    part = _t.c.config[name]
    number = func.json_typeof(part) == "number"
    return [case((number, part.as_float())), part.as_string()]
