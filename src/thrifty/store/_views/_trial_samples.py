"""Samples of a study's trials, as many as a chart can show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Engine,
    Row,
    Select,
    and_,
    case,
    cast,
    func,
    or_,
    select,
)

from thrifty.store import _schema as schema

from ._trials import counting, reading


_t, _n, _e = schema.trials, schema.nodes, schema.epochs


class TrialSamples:
    """Trials for charts: all values, the best trials, pseudo-random and evenly ranked ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def values(self, study: int) -> list[tuple[int, float, bool]]:
        """Return number, value and whether it counts, for all trials that have a value.

        A trial counts if it has not failed and is feasible.
        """
        counts = case((counting(), 1), else_=0)
        query = (
            select(_t.c.number, _t.c.value, counts)
            .where(_t.c.study == study, _t.c.value.is_not(None))
            .order_by(_t.c.number)
        )
        with reading(self._engine) as connection:
            return [(n, v, bool(c)) for n, v, c in connection.execute(query)]

    def best(self, study: int, *, mode: str, limit: int) -> Sequence[Row[Any]]:
        """Return the best trials: number, node, reached, value, state."""
        value = _t.c.value.asc() if mode == "min" else _t.c.value.desc()
        query = _placed().where(_t.c.study == study, counting(), _t.c.value.is_not(None))
        with reading(self._engine) as connection:
            return connection.execute(query.order_by(value, _t.c.number).limit(limit)).all()

    def some(self, study: int, *, limit: int) -> Sequence[Row[Any]]:
        """Return pseudo-random trials; the choice hardly changes while trials are added.

        Rows have number, node, reached, value and state.
        """
        query = _placed().where(_t.c.study == study, _t.c.reached > 0)
        with reading(self._engine) as connection:
            return connection.execute(query.order_by(_shuffled()).limit(limit)).all()

    def spread(self, study: int, *, limit: int) -> Sequence[Row[Any]]:
        """Return at most ``limit`` trials, spread evenly over the ranks of their values.

        Rows have number, value, reached, state and config.
        """
        rank = func.row_number().over(order_by=(_t.c.value, _t.c.number)).label("rank")
        ranked = (
            select(_t.c.number, rank, func.count().over().label("total"))
            .where(_t.c.study == study, _t.c.value.is_not(None))
            .subquery()
        )
        # Take one trial in each of `limit` equal parts.
        at, total = ranked.c.rank, ranked.c.total
        chosen = select(ranked.c.number).where(
            or_(total <= limit, at * limit // total > (at - 1) * limit // total)
        )
        query: Select[Any] = (
            select(_t.c.number, _t.c.value, _t.c.reached, _t.c.state, _t.c.config)
            .where(_t.c.study == study, _t.c.number.in_(chosen))
            .order_by(_t.c.value, _t.c.number)
        )
        with reading(self._engine) as connection:
            return connection.execute(query).all()

    def levels(self, study: int) -> list[tuple[int, int]]:
        """Return ``(epoch, number of trials that stand there)`` by epoch; skip failed trials."""
        query = (
            select(_t.c.reached, func.count())
            .where(_t.c.study == study, _t.c.reached > 0, _t.c.state != "failed")
            .group_by(_t.c.reached)
            .order_by(_t.c.reached)
        )
        with reading(self._engine) as connection:
            return [(epoch, number) for epoch, number in connection.execute(query)]

    def at_epoch(
        self, study: int, epoch: int, *, plan: int, limit: int
    ) -> list[tuple[Mapping[str, Any], Mapping[str, float]]]:
        """Return configurations and metrics of at most ``limit`` trials after an epoch.

        Only trials that have reached the epoch and have not failed are taken. Configurations are
        in their JSON form.
        """
        first = (
            select(_t.c.number, _n.c.node, _n.c.parent, _n.c.start)
            .join(_n, and_(_n.c.plan == plan, _n.c.node == _t.c.node))
            .where(_t.c.study == study, _t.c.reached >= epoch, _t.c.state != "failed")
            .order_by(_shuffled())
            .limit(limit)
            .subquery()
        )
        up = _n.alias()
        path = select(first).cte("path", recursive=True)
        path = path.union_all(
            select(path.c.number, up.c.node, up.c.parent, up.c.start).where(
                up.c.plan == plan, up.c.node == path.c.parent, path.c.start >= epoch
            )
        )
        # Use look-ups instead of joins: SQLite would start a join with all epochs of the plan.
        config = select(_t.c.config).where(_t.c.study == study, _t.c.number == path.c.number)
        metrics = select(_e.c.metrics).where(
            _e.c.plan == plan, _e.c.node == path.c.node, _e.c.epoch == epoch
        )
        query = (
            select(config.scalar_subquery(), metrics.scalar_subquery())
            .where(path.c.start < epoch)
            .order_by(path.c.number)
        )
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
        return [(config, json.loads(text)) for config, text in found if text is not None]


def _placed() -> Select[Any]:
    return select(_t.c.number, _t.c.node, _t.c.reached, _t.c.value, _t.c.state)


def _shuffled() -> ColumnElement[int]:
    """Return a pseudo-random sort key of trials: Knuth's multiplicative hash of their number.

    The database needs no random numbers, and a reload shows the same trials.
    """
    return (cast(_t.c.number, BigInteger) * 2_654_435_761) % 4_294_967_296
