"""The table of a study's trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Row, func, select

from thrifty.store import _schema as schema

from ._reading import reading
from ._trial_filter import TrialFilter, passes
from ._trial_order import COLUMNS, Order, sort_keys


_t = schema.trials


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
