"""What pages show: aggregated, read-only looks at a database, a statement each where that is possible.

Nothing here grows with the number of trials in Python unless it must: the database counts, sorts and thins out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Self

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    Text,
    and_,
    case,
    cast,
    event,
    false,
    func,
    not_,
    or_,
    select,
)

from thrifty.core import UsageError

from . import _schema as schema
from ._engine import open_engine, user_errors


Order = Literal["asc", "desc"]
COLUMNS = ("number", "state", "value", "reached", "target", "violation")
"""What trials can be sorted by, besides their hyper-parameters."""

_t, _n, _e, _s = schema.trials, schema.nodes, schema.epochs, schema.studies


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """A study at a glance.

    ``num_trials`` counts by state; ``asked_epochs`` and ``reached_epochs`` are sums over its trials; ``trained_epochs``
    and ``seconds`` are what its own runs trained. ``metrics`` and ``modes`` are its objectives.
    """

    id: int
    name: str
    plan: int
    task: str
    state: str
    spec: Mapping[str, Any]
    metrics: tuple[str, ...]
    modes: tuple[str, ...]
    created_at: float
    last_activity: float | None
    num_trials: Mapping[str, int]
    asked_epochs: int
    reached_epochs: int
    trained_epochs: int
    seconds: float
    best_value: float | None
    best_trial: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """Which trials: in some states (none given: all), with a text in their hyper-parameters, a value in a range.

    States are those of ``Study.trials``: of trials that wait, those that reached ``max_epochs`` are ``"done"``, the
    others ``"paused"``.
    """

    states: Sequence[str] = ()
    max_epochs: int | None = None
    text: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Nodes on the way to some others: ``origins`` gives parent and start, ``metrics`` is by node and epoch."""

    origins: Mapping[int, tuple[int | None, int]]
    metrics: Mapping[tuple[int, int], Mapping[str, float]]

    def curve(self, node: int, reached: int) -> list[tuple[int, Mapping[str, float]]]:
        """Epochs up to ``reached`` on the path to a node, ascending, with what is known there."""
        spans = []
        at: int | None = node
        while at is not None and at in self.origins:
            parent, start = self.origins[at]
            spans.append((at, start, reached))
            at, reached = parent, min(reached, start)
        return [
            (epoch, self.metrics[of, epoch])
            for of, start, stop in reversed(spans)
            for epoch in range(start + 1, stop + 1)
            if (of, epoch) in self.metrics
        ]


class Views:
    """Read-only looks at a database that others write.

    >>> from thrifty.store import Store
    >>> import tempfile
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/t.db"
    >>> with Store.open(url) as store:
    ...     plan = store.plans.open("what is trained", task="Digits").id
    ...     made = store.studies.create("first", plan=plan, spec={"metric": "loss", "mode": "min"})
    >>> with Views.open(url) as views:
    ...     [(study.name, study.metrics) for study in views.studies()]
    [('first', ('loss',))]
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens a database of the present version on connections that cannot write.

        Raises:
            UsageError: not a database address, or a database in memory.
            StudyNotFoundError: there is no such file.
            StoreVersionError: a newer thrifty wrote it.
            StoreUnreachableError: its server does not answer.
            MissingExtraError: PostgreSQL's driver is not installed.
        """
        engine = open_engine(url, create=False)
        sqlite = engine.dialect.name == "sqlite"
        if sqlite and engine.url.database in (None, "", ":memory:"):
            engine.dispose()
            raise UsageError(
                f"{url!r} is a database in memory, which only its own process sees; name a file"
            )
        engine.dispose()  # the connection that brought it up to date could write
        event.listen(engine, "connect", _sqlite_reads if sqlite else _postgresql_reads)
        return cls(engine)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- studies ----------------------------------------------------------------------

    def stamp(self, study: int | None = None) -> str | None:
        """A short text that changes whenever something is written about a study (or any); None: no such study."""
        plans, log, stages = schema.plans, schema.log, schema.stages
        query = select(_s.c.id, _s.c.plan, _s.c.state, plans.c.revision).join(plans)
        last = select(func.max(log.c.id))
        ended = select(func.max(stages.c.id))
        if study is not None:
            query, last = query.where(_s.c.id == study), last.where(log.c.study == study)
            ended = ended.where(
                stages.c.plan == select(_s.c.plan).where(_s.c.id == study).scalar_subquery()
            )
        with self._reading() as connection:
            rows = connection.execute(query.order_by(_s.c.id)).all()
            if study is not None and not rows:
                return None
            counts = select(last.scalar_subquery(), ended.scalar_subquery())
            known = [tuple(row) for row in rows], tuple(connection.execute(counts).one())
        return blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def studies(self) -> list[StudyView]:
        """All studies, oldest first."""
        return self._studies(None)

    def study(self, study: int) -> StudyView | None:
        """One study, if there is one of this number."""
        return next(iter(self._studies(study)), None)

    def _studies(self, study: int | None) -> list[StudyView]:
        with self._reading() as connection:
            base = connection.execute(_only(_base(), _s.c.id, study)).all()
            plan = base[0].plan if study is not None and base else None
            counts = connection.execute(_only(_counts(), _t.c.study, study)).all()
            trained = {
                row.study: (row.epochs, row.seconds)
                for row in connection.execute(_only(_trained(), _e.c.plan, plan))
            }
            extremes: dict[int, dict[float, int]] = {}
            for row in connection.execute(_extremes(study)):
                extremes.setdefault(row.study, {})[row.value] = row.number
        by_study: dict[int, list[Row[Any]]] = {}
        for row in counts:
            by_study.setdefault(row.study, []).append(row)
        return [
            _view(
                row,
                by_study.get(row.id, []),
                trained=trained.get(row.id, (0, 0.0)),
                extremes=extremes.get(row.id, {}),
            )
            for row in base
        ]

    # -- trials -----------------------------------------------------------------------

    def count(self, study: int, which: TrialFilter) -> int:
        """How many trials a filter lets through."""
        query = select(func.count()).select_from(_t).where(_passes(study, which))
        with self._reading() as connection:
            return int(connection.execute(query).scalar_one())

    def trials(
        self,
        study: int,
        which: TrialFilter,
        *,
        sort: str = "number",
        order: Order = "asc",
        offset: int = 0,
        limit: int = 50,
    ) -> Sequence[Row[Any]]:
        """A page of trials, sorted by one of ``COLUMNS`` or by a hyper-parameter (``"param:lr"``); no value comes last.

        Rows have ``COLUMNS``, ``config`` (as JSON has it) and ``objectives``.

        Raises:
            UsageError: an unknown column, or a name that no statement can hold.
        """
        keys = self._sort_keys(sort)
        ranked = [
            part
            for key in keys
            for part in (key.is_(None), key.desc() if order == "desc" else key.asc())
        ]
        columns = [_t.c[name] for name in (*COLUMNS, "config", "objectives")]
        query = (
            select(*columns)
            .where(_passes(study, which))
            .order_by(*ranked, _t.c.number)
            .offset(offset)
            .limit(limit)
        )
        with self._reading() as connection:
            return connection.execute(query).all()

    def trial(self, study: int, number: int) -> Row[Any] | None:
        """All that is recorded of one trial."""
        query = select(_t).where(_t.c.study == study, _t.c.number == number)
        with self._reading() as connection:
            return connection.execute(query).first()

    def values(self, study: int) -> list[tuple[int, float, bool]]:
        """Of all trials that have a value: number, value, whether it counts (not failed, within the constraints)."""
        counts = case((_counting(), 1), else_=0)
        query = (
            select(_t.c.number, _t.c.value, counts)
            .where(_t.c.study == study, _t.c.value.is_not(None))
            .order_by(_t.c.number)
        )
        with self._reading() as connection:
            return [(n, v, bool(c)) for n, v, c in connection.execute(query)]

    def best(self, study: int, *, mode: str, limit: int) -> Sequence[Row[Any]]:
        """The best trials: number, node, reached, value, state."""
        value = _t.c.value.asc() if mode == "min" else _t.c.value.desc()
        query = _placed().where(_t.c.study == study, _counting(), _t.c.value.is_not(None))
        with self._reading() as connection:
            return connection.execute(query.order_by(value, _t.c.number).limit(limit)).all()

    def some(self, study: int, *, limit: int) -> Sequence[Row[Any]]:
        """Trials that look random and hardly change while others are added: number, node, reached, value, state."""
        # Knuth's multiplicative hash: the database needs no random numbers, and a reload shows the same
        shuffled = (cast(_t.c.number, BigInteger) * 2_654_435_761) % 4_294_967_296
        query = _placed().where(_t.c.study == study, _t.c.reached > 0)
        with self._reading() as connection:
            return connection.execute(query.order_by(shuffled).limit(limit)).all()

    def spread(self, study: int, *, limit: int) -> Sequence[Row[Any]]:
        """At most so many trials, evenly over the ranks of their values: number, value, reached, state, config."""
        rank = func.row_number().over(order_by=(_t.c.value, _t.c.number)).label("rank")
        ranked = (
            select(_t.c.number, rank, func.count().over().label("total"))
            .where(_t.c.study == study, _t.c.value.is_not(None))
            .subquery()
        )
        # one in each of `limit` equal parts
        at, total = ranked.c.rank, ranked.c.total
        chosen = select(ranked.c.number).where(
            or_(total <= limit, at * limit // total > (at - 1) * limit // total)
        )
        query: Select[Any] = (
            select(_t.c.number, _t.c.value, _t.c.reached, _t.c.state, _t.c.config)
            .where(_t.c.study == study, _t.c.number.in_(chosen))
            .order_by(_t.c.value, _t.c.number)
        )
        with self._reading() as connection:
            return connection.execute(query).all()

    def levels(self, study: int) -> list[tuple[int, int]]:
        """How many trials that have not failed stand at each epoch, ascending."""
        query = (
            select(_t.c.reached, func.count())
            .where(_t.c.study == study, _t.c.reached > 0, _t.c.state != "failed")
            .group_by(_t.c.reached)
            .order_by(_t.c.reached)
        )
        with self._reading() as connection:
            return [(epoch, number) for epoch, number in connection.execute(query)]

    def at_epoch(
        self, study: int, epoch: int, *, plan: int, limit: int
    ) -> list[tuple[Mapping[str, Any], Mapping[str, float]]]:
        """Configurations (as JSON has them) and metrics of at most so many trials after an epoch they have all passed."""
        shuffled = (cast(_t.c.number, BigInteger) * 2_654_435_761) % 4_294_967_296
        first = (
            select(_t.c.number, _n.c.node, _n.c.parent, _n.c.start)
            .join(_n, and_(_n.c.plan == plan, _n.c.node == _t.c.node))
            .where(_t.c.study == study, _t.c.reached >= epoch, _t.c.state != "failed")
            .order_by(shuffled)
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
        # look-ups, not joins: SQLite would begin with all epochs of the plan
        config = select(_t.c.config).where(_t.c.study == study, _t.c.number == path.c.number)
        metrics = select(_e.c.metrics).where(
            _e.c.plan == plan, _e.c.node == path.c.node, _e.c.epoch == epoch
        )
        query = (
            select(config.scalar_subquery(), metrics.scalar_subquery())
            .where(path.c.start < epoch)
            .order_by(path.c.number)
        )
        with self._reading() as connection:
            found = connection.execute(query).all()
        return [(config, json.loads(text)) for config, text in found if text is not None]

    # -- plans ------------------------------------------------------------------------

    def paths(self, plan: int, nodes: Sequence[int], *, every: int = 1) -> Paths:
        """The nodes on the way to these, with the metrics of every so manieth epoch."""
        first = select(_n.c.node, _n.c.parent, _n.c.start).where(
            _n.c.plan == plan, _n.c.node.in_(set(nodes))
        )
        up = _n.alias()
        path = first.cte("path", recursive=True)
        path = path.union(
            select(up.c.node, up.c.parent, up.c.start).where(
                up.c.plan == plan, up.c.node == path.c.parent
            )
        )
        query = select(path, _e.c.epoch, _e.c.metrics).outerjoin(
            _e,
            and_(_e.c.plan == plan, _e.c.node == path.c.node, _e.c.epoch % every == 0),
        )
        origins: dict[int, tuple[int | None, int]] = {}
        metrics: dict[tuple[int, int], Mapping[str, float]] = {}
        with self._reading() as connection:
            for node, parent, start, epoch, text in connection.execute(query):
                origins[node] = (parent, start)
                if epoch is not None:
                    metrics[node, epoch] = json.loads(text)
        return Paths(origins=origins, metrics=metrics)

    def tree(self, plan: int) -> Sequence[Row[Any]]:
        """All nodes of a plan in their order: node, parent, start, last (the last epoch that is trained)."""
        last = (
            select(_e.c.node, func.max(_e.c.epoch).label("last"))
            .where(_e.c.plan == plan)
            .group_by(_e.c.node)
            .subquery()
        )
        query: Select[Any] = (
            select(_n.c.node, _n.c.parent, _n.c.start, last.c.last)
            .outerjoin(last, last.c.node == _n.c.node)
            .where(_n.c.plan == plan)
            .order_by(_n.c.node)
        )
        with self._reading() as connection:
            return connection.execute(query).all()

    def ends(self, study: int) -> Sequence[Row[Any]]:
        """Where trials of a study end (or are to): node, epoch, trials, failed, low, high, first."""
        epoch = case((_t.c.state == "running", _t.c.target), else_=_t.c.reached).label("epoch")
        value = case((_counting(), _t.c.value))
        query = (
            select(
                _t.c.node,
                epoch,
                func.count().label("trials"),
                func.sum(case((_t.c.state == "failed", 1), else_=0)).label("failed"),
                func.min(value).label("low"),
                func.max(value).label("high"),
                func.min(_t.c.number).label("first"),
            )
            .where(_t.c.study == study)
            .group_by(_t.c.node, epoch)
        )
        with self._reading() as connection:
            return connection.execute(query).all()

    def extent(self, plan: int) -> Row[Any]:
        """Of all stages that were trained for a plan: number, began, ended, workers."""
        g = schema.stages
        query = select(
            func.count().label("number"),
            func.min(g.c.started_at).label("began"),
            func.max(g.c.started_at + g.c.seconds).label("ended"),
            func.count(g.c.worker.distinct()).label("workers"),
        ).where(g.c.plan == plan)
        with self._reading() as connection:
            return connection.execute(query).one()

    def stages(
        self, plan: int, *, since: float | None, until: float | None, limit: int
    ) -> tuple[int, Sequence[Row[Any]]]:
        """How many stages overlap a span of time, and the longest of them in the order of their beginnings."""
        g = schema.stages
        inside = [g.c.plan == plan]
        if since is not None:
            inside.append(g.c.started_at + g.c.seconds >= since)
        if until is not None:
            inside.append(g.c.started_at <= until)
        longest = (
            select(g.c.id).where(*inside).order_by(g.c.seconds.desc(), g.c.id).limit(limit)
        )
        query = select(g).where(g.c.id.in_(longest)).order_by(g.c.started_at, g.c.id)
        with self._reading() as connection:
            total = connection.execute(select(func.count()).select_from(g).where(*inside))
            return int(total.scalar_one()), connection.execute(query).all()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with user_errors(self._engine), self._engine.connect() as connection:
            yield connection

    def _sort_keys(self, sort: str) -> list[ColumnElement[Any]]:
        if sort in COLUMNS:
            return [_t.c[sort]]
        if not sortable(sort):
            raise UsageError(
                f"cannot sort trials by {sort!r}; use one of {', '.join(COLUMNS)} or param:NAME"
            )
        name = sort.removeprefix("param:")
        if self._engine.dialect.name == "sqlite":
            # numbers as numbers, and before texts
            return [func.json_extract(_t.c.config, f'$."{name}"')]
        part = _t.c.config[name]
        number = func.json_typeof(part) == "number"
        return [case((number, part.as_float())), part.as_string()]


def sortable(sort: str) -> bool:
    """Whether trials can be sorted by this: one of ``COLUMNS``, or a hyper-parameter whose name fits into a statement.

    >>> sortable("value"), sortable("param:lr"), sortable("lr"), sortable('param:"')
    (True, True, False, False)
    """
    kind, _, name = sort.partition(":")
    return sort in COLUMNS or (kind == "param" and name != "" and not {'"', "\0"} & set(name))


def _sqlite_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _postgresql_reads(connection: Any, record: object) -> None:  # noqa: ARG001
    connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()


def _only(query: Select[Any], column: ColumnElement[int], value: int | None) -> Select[Any]:
    return query if value is None else query.where(column == value)


def _counting() -> ColumnElement[bool]:
    return and_(_t.c.state != "failed", func.coalesce(_t.c.violation, 0.0) == 0.0)


def _placed() -> Select[Any]:
    return select(_t.c.number, _t.c.node, _t.c.reached, _t.c.value, _t.c.state)


def _base() -> Select[Any]:
    log = schema.log
    last = (
        select(log.c.at)
        .where(log.c.study == _s.c.id)
        .order_by(log.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    return (
        select(_s, schema.plans.c.task, last.label("last_activity"))
        .join(schema.plans)
        .order_by(_s.c.id)
    )


def _counts() -> Select[Any]:
    return select(
        _t.c.study,
        _t.c.state,
        func.count().label("trials"),
        func.sum(_t.c.target).label("asked"),
        func.sum(_t.c.reached).label("reached"),
    ).group_by(_t.c.study, _t.c.state)


def _trained() -> Select[Any]:
    return select(
        _e.c.study, func.count().label("epochs"), func.sum(_e.c.seconds).label("seconds")
    ).group_by(_e.c.study)


def _extremes(study: int | None) -> Select[Any]:
    """Of each study the lowest and the highest value, and the first trial that has it."""
    ends = _only(
        select(
            _t.c.study,
            func.min(_t.c.value).label("low"),
            func.max(_t.c.value).label("high"),
        ).where(_counting()),
        _t.c.study,
        study,
    )
    found = ends.group_by(_t.c.study).subquery()
    same = and_(
        _t.c.study == found.c.study,
        or_(_t.c.value == found.c.low, _t.c.value == found.c.high),
        _counting(),
    )
    return (
        select(_t.c.study, _t.c.value, func.min(_t.c.number).label("number"))
        .join(found, same)
        .group_by(_t.c.study, _t.c.value)
    )


def _passes(study: int, which: TrialFilter) -> ColumnElement[bool]:
    parts = [_t.c.study == study]
    if which.states:
        parts.append(or_(*(_in_state(state, which.max_epochs) for state in which.states)))
    if which.text:
        # as the JSON is written: other letters than ASCII are escaped there
        text = json.dumps(which.text)[1:-1]
        parts.append(cast(_t.c.config, Text).icontains(text, autoescape=True))
    if which.low is not None:
        parts.append(_t.c.value >= which.low)
    if which.high is not None:
        parts.append(_t.c.value <= which.high)
    return and_(*parts)


def _in_state(state: str, max_epochs: int | None) -> ColumnElement[bool]:
    if state not in ("done", "paused"):
        return _t.c.state == state
    farthest = false() if max_epochs is None else _t.c.reached >= max_epochs
    return and_(_t.c.state == "waiting", farthest if state == "done" else not_(farthest))


def _view(
    row: Row[Any],
    counts: Sequence[Row[Any]],
    *,
    trained: tuple[int, float],
    extremes: Mapping[float, int],
) -> StudyView:
    metrics, modes = _names(row.spec, "metric"), _names(row.spec, "mode")
    best = None
    if extremes:
        best = min(extremes) if modes[:1] == ("min",) else max(extremes)
    return StudyView(
        id=row.id,
        name=row.name,
        plan=row.plan,
        task=row.task,
        state=row.state,
        spec=row.spec,
        metrics=metrics,
        modes=modes,
        created_at=row.created_at,
        last_activity=row.last_activity,
        num_trials={count.state: count.trials for count in counts},
        asked_epochs=sum(count.asked for count in counts),
        reached_epochs=sum(count.reached for count in counts),
        trained_epochs=trained[0],
        seconds=trained[1] if math.isfinite(trained[1]) else 0.0,
        best_value=best,
        best_trial=None if best is None else extremes[best],
    )


def _names(spec: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = spec.get(key, "")
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
