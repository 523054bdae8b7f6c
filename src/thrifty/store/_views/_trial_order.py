"""Columns and hyper-parameters by which trials can be sorted."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ColumnElement, case, func

from thrifty.core import UsageError
from thrifty.store import _schema as schema


Order = Literal["asc", "desc"]
COLUMNS = ("number", "state", "value", "reached", "target", "violation")
"""Columns by which trials can be sorted, besides their hyper-parameters."""

_t = schema.trials


def sortable(sort: str) -> bool:
    """Return whether trials can be sorted by ``sort``.

    It must be one of ``COLUMNS``, or ``param:NAME`` with a name that can stand in a SQL statement.

    >>> sortable("value"), sortable("param:lr"), sortable("lr"), sortable('param:"')
    (True, True, False, False)
    """
    kind, _, name = sort.partition(":")
    return sort in COLUMNS or (kind == "param" and name != "" and not {'"', "\0"} & set(name))


def sort_keys(sort: str, *, dialect: str) -> list[ColumnElement[Any]]:
    """Return the SQL expressions to sort trials by.

    Raises:
        UsageError: ``sort`` is an unknown column, or a name that cannot stand in a SQL statement.
    """
    if sort in COLUMNS:
        return [_t.c[sort]]
    if not sortable(sort):
        raise UsageError(
            f"cannot sort trials by {sort!r}; use one of {', '.join(COLUMNS)} or param:NAME"
        )
    name = sort.removeprefix("param:")
    if dialect == "sqlite":
        # SQLite sorts numbers numerically, and before texts.
        return [func.json_extract(_t.c.config, f'$."{name}"')]
    part = _t.c.config[name]
    number = func.json_typeof(part) == "number"
    return [case((number, part.as_float())), part.as_string()]
