"""Queries about trials and samples of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Engine,
    Row,
    Select,
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
from thrifty.store._engine import fetch
from thrifty.store._records import StudyInfo, TrialRecord


_t = schema.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """A filter of trials by state (none given: all), hyper-parameter text, and range of values.

    States are those of ``Study.trials``: a waiting trial is ``"done"`` if it has reached
    its horizon, or ``max_epochs`` if it has none, else ``"paused"``. If no process runs the study
    (``is_run``), no trial is running: those that were in training are paused.
    """

    states: Sequence[str] = ()
    max_epochs: int | None = None
    is_run: bool = True
    text: str = ""
    low: float | None = None
    high: float | None = None


def passes(study: int, which: TrialFilter) -> ColumnElement[bool]:
    """Return the SQL condition of a filter on the trials of a study."""
    parts = [_t.c.study == study]
    if which.states:
        parts.append(or_(*(_in_state(state, which) for state in which.states)))
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
    """Return the SQL condition of trials that may be the best, as in ``store.best_trials``.

    They have not failed and keep the constraints; whether they are finished does not matter.
    """
    return and_(_t.c.state != "failed", func.coalesce(_t.c.violation, 0.0) == 0.0)


def _in_state(state: str, which: TrialFilter) -> ColumnElement[bool]:
    if state == "running" and not which.is_run:
        return false()
    if state not in ("done", "paused"):
        return _t.c.state == state
    last = which.max_epochs
    horizon = _t.c.horizon if last is None else func.coalesce(_t.c.horizon, last)
    farthest = func.coalesce(_t.c.reached >= horizon, false())
    if state == "done":
        return and_(_t.c.state == "waiting", farthest)
    waits = and_(_t.c.state == "waiting", not_(farthest))
    return waits if which.is_run else or_(waits, _t.c.state == "running")


Order = Literal["asc", "desc"]
COLUMNS = ("number", "state", "value", "reached", "target", "violation", "horizon")
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
        return int(fetch(self._engine, query)[0][0])

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
        return fetch(self._engine, query)

    def get(self, study: int, number: int) -> Row[Any] | None:
        """Return the whole row of one trial, or None."""
        query = select(_t).where(_t.c.study == study, _t.c.number == number)
        return next(iter(fetch(self._engine, query)), None)


_n, _e = schema.nodes, schema.epochs


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
        return [(n, v, bool(c)) for n, v, c in fetch(self._engine, query)]

    def objectives(self, study: int) -> list[tuple[int, dict[str, float]]]:
        """Return number and objectives of all trials that count, of a study with several."""
        query = (
            select(_t.c.number, _t.c.objectives)
            .where(_t.c.study == study, _t.c.objectives.is_not(None), counting())
            .order_by(_t.c.number)
        )
        return [(number, values) for number, values in fetch(self._engine, query)]

    def best(self, study: int, *, mode: str, limit: int) -> Sequence[Row[Any]]:
        """Return the best trials: number, node, reached, value, state."""
        value = _t.c.value.asc() if mode == "min" else _t.c.value.desc()
        query = _placed().where(_t.c.study == study, counting(), _t.c.value.is_not(None))
        return fetch(self._engine, query.order_by(value, _t.c.number).limit(limit))

    def some(self, study: int, *, limit: int) -> Sequence[Row[Any]]:
        """Return pseudo-random trials; the choice hardly changes while trials are added.

        Rows have number, node, reached, value and state.
        """
        query = _placed().where(_t.c.study == study, _t.c.reached > 0)
        return fetch(self._engine, query.order_by(_shuffled()).limit(limit))

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
        return fetch(self._engine, query)

    def levels(self, study: int) -> list[tuple[int, int]]:
        """Return ``(epoch, number of trials that stand there)`` by epoch; skip failed trials."""
        query = (
            select(_t.c.reached, func.count())
            .where(_t.c.study == study, _t.c.reached > 0, _t.c.state != "failed")
            .group_by(_t.c.reached)
            .order_by(_t.c.reached)
        )
        return [(epoch, number) for epoch, number in fetch(self._engine, query)]

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
        found = fetch(self._engine, query)
        return [(config, json.loads(text)) for config, text in found if text is not None]


def _placed() -> Select[Any]:
    return select(
        _t.c.number, _t.c.node, _t.c.replicas, _t.c.reached, _t.c.value, _t.c.state, _t.c.horizon
    )


def _shuffled() -> ColumnElement[int]:
    """Return a pseudo-random sort key of trials: Knuth's multiplicative hash of their number.

    The database needs no random numbers, and a reload shows the same trials.
    """
    return (cast(_t.c.number, BigInteger) * 2_654_435_761) % 4_294_967_296


def nondominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the ascending indices of the points that no other point dominates.

    Higher is better in each coordinate. A point dominates another if it is worse in no coordinate
    and better in at least one, so equal points do not dominate each other.

    >>> nondominated([(1, 3), (2, 2), (1, 2), (3, 1), (2, 2)])
    [0, 1, 3, 4]
    """
    if not len(points):
        return []
    table = np.asarray(points, float)
    # Sort in descending order, so that only earlier points can dominate a point.
    order = np.lexsort(table.T[::-1])[::-1]
    front = _scan(table[order]) if table.shape[1] <= 2 else _sweep(table[order])
    return sorted(int(order[index]) for index in front)


def _scan(ranked: np.ndarray) -> list[int]:
    """Return the Pareto front of sorted points with one or two objectives.

    A point is on it if it improves the last objective, or equals the last point that did.
    """
    out: list[int] = []
    for index, point in enumerate(ranked):
        if not out or point[-1] > ranked[out[-1]][-1] or (point == ranked[out[-1]]).all():
            out.append(index)
    return out


def _sweep(ranked: np.ndarray) -> list[int]:
    """Return the Pareto front of sorted points: compare each point with the front so far."""
    out: list[int] = []
    front = np.empty_like(ranked)
    for index, point in enumerate(ranked):
        above = front[: len(out)]
        beaten = (above >= point).all(axis=1) & (above > point).any(axis=1)
        if not beaten.any():
            front[len(out)] = point
            out.append(index)
    return out


def best_trials(info: StudyInfo, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the best recorded trial of a study, or its Pareto front if it has several objectives.

    Trials are compared by their metric at the epoch that each has reached. A trial counts if it has
    reported, has not failed and keeps the constraints, whether or not its training goes on. The
    result is empty if there is none. If trials tie in a single objective, the first is the best.
    """
    valued = [t for t in trials if t.state != "failed" and t.value is not None and t.feasible]
    metric, mode = info.spec.get("metric"), info.spec.get("mode")
    if not isinstance(metric, list) or not isinstance(mode, list):
        sign = -1.0 if mode == "min" else 1.0
        return sorted(valued, key=lambda t: -sign * (t.value or 0.0))[:1]
    signs = {name: -1.0 if m == "min" else 1.0 for name, m in zip(metric, mode, strict=True)}
    points = [[sign * (t.objectives or {})[name] for name, sign in signs.items()] for t in valued]
    return [valued[index] for index in nondominated(points)]
