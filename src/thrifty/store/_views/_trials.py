"""The table of a study's trials: which are shown, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    Text,
    and_,
    case,
    cast,
    false,
    func,
    not_,
    or_,
    select,
)

from thrifty.core import UsageError
from thrifty.store import _schema as schema
from thrifty.store._engine import user_errors


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a short-lived connection; database errors become errors that users understand."""
    with user_errors(engine), engine.connect() as connection:
        yield connection


_t = schema.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """A filter of trials by state (none given: all), hyper-parameter text, and range of values.

    States are those of ``Study.trials``: a waiting trial is ``"done"`` if it has reached
    ``max_epochs``, else ``"paused"``.
    """

    states: Sequence[str] = ()
    max_epochs: int | None = None
    text: str = ""
    low: float | None = None
    high: float | None = None


def passes(study: int, which: TrialFilter) -> ColumnElement[bool]:
    """Return the SQL condition of a filter on the trials of a study."""
    parts = [_t.c.study == study]
    if which.states:
        parts.append(or_(*(_in_state(state, which.max_epochs) for state in which.states)))
    if which.text:
        # Escape the text as in the stored JSON, which escapes non-ASCII characters.
        text = json.dumps(which.text)[1:-1]
        parts.append(cast(_t.c.config, Text).icontains(text, autoescape=True))
    if which.low is not None:
        parts.append(_t.c.value >= which.low)
    if which.high is not None:
        parts.append(_t.c.value <= which.high)
    return and_(*parts)


def counting() -> ColumnElement[bool]:
    """Return the SQL condition of trials that may be the best: not failed, and feasible."""
    return and_(_t.c.state != "failed", func.coalesce(_t.c.violation, 0.0) == 0.0)


def _in_state(state: str, max_epochs: int | None) -> ColumnElement[bool]:
    if state not in ("done", "paused"):
        return _t.c.state == state
    farthest = false() if max_epochs is None else _t.c.reached >= max_epochs
    return and_(_t.c.state == "waiting", farthest if state == "done" else not_(farthest))


Order = Literal["asc", "desc"]
COLUMNS = ("number", "state", "value", "reached", "target", "violation")
"""Columns by which trials can be sorted, besides their hyper-parameters."""


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


class TrialViews:
    """A table of trials, filtered, sorted and paged."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def count(self, study: int, which: TrialFilter) -> int:
        """Return how many trials pass a filter."""
        query = select(func.count()).select_from(_t).where(passes(study, which))
        with reading(self._engine) as connection:
            return int(connection.execute(query).scalar_one())

    def page(
        self,
        study: int,
        which: TrialFilter,
        *,
        sort: str = "number",
        order: Order = "asc",
        offset: int = 0,
        limit: int = 50,
    ) -> Sequence[Row[Any]]:
        """Return a page of trials, sorted by one of ``COLUMNS`` or a hyper-parameter.

        A hyper-parameter is written as ``"param:lr"``. Trials without a value come last. Rows have
        ``COLUMNS``, ``config`` (in its JSON form) and ``objectives``.

        Raises:
            UsageError: ``sort`` is an unknown column, or a name that cannot stand in a SQL
                statement.
        """
        keys = sort_keys(sort, dialect=self._engine.dialect.name)
        ranked = [
            part
            for key in keys
            for part in (key.is_(None), key.desc() if order == "desc" else key.asc())
        ]
        columns = [_t.c[name] for name in (*COLUMNS, "config", "objectives")]
        query = (
            select(*columns)
            .where(passes(study, which))
            .order_by(*ranked, _t.c.number)
            .offset(offset)
            .limit(limit)
        )
        with reading(self._engine) as connection:
            return connection.execute(query).all()

    def get(self, study: int, number: int) -> Row[Any] | None:
        """Return the whole row of one trial, or None."""
        query = select(_t).where(_t.c.study == study, _t.c.number == number)
        with reading(self._engine) as connection:
            return connection.execute(query).first()
