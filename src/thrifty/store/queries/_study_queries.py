"""Queries about studies and the database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

from sqlalchemy import ColumnElement, Engine, Row, Select, and_, func, or_, select

from thrifty.core import SystemClock, UsageError
from thrifty.store import _schema as schema
from thrifty.store._address import redact_url
from thrifty.store._engine import forbid_writing, open_engine
from thrifty.store.coordination._leases import standing

from ._plan_queries import PlanViews
from ._trial_queries import TrialSamples, TrialViews, counting, reading


class Views:
    """Read-only views of a database that other processes write.

    ``studies`` are summaries of the studies, ``trials`` is the table of their trials, ``samples``
    are as many trials as a chart can show, and ``plans`` is what was trained.

    >>> from thrifty.store import Store
    >>> import tempfile
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/t.db"
    >>> with Store.open(url) as store:
    ...     plan = store.plans.open("what is trained", task="Digits").id
    ...     made = store.studies.create(
    ...         "first", plan=plan, spec={"metric": "loss", "mode": "min"}
    ...     )
    >>> with Views.open(url) as views:
    ...     [(study.name, study.metrics) for study in views.studies.list()]
    [('first', ('loss',))]
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.studies = StudyViews(engine)
        self.trials = TrialViews(engine)
        self.samples = TrialSamples(engine)
        self.plans = PlanViews(engine)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a database on read-only connections, after a migration if it needs one.

        Raises:
            UsageError: ``url`` is not a database address, or names a database in memory.
            StudyNotFoundError: There is no such file.
            StoreVersionError: A newer thrifty wrote the database.
            StoreUnreachableError: The database server does not answer.
            MissingExtraError: PostgreSQL's driver is not installed.
        """
        engine = open_engine(url, create=False)
        sqlite = engine.dialect.name == "sqlite"
        if sqlite and engine.url.database in (None, "", ":memory:"):
            engine.dispose()
            raise UsageError(
                f"{redact_url(url)} is a database in memory, which only its own process sees; "
                "name a file"
            )
        engine.dispose()  # close the connection that may have migrated it, which can write
        forbid_writing(engine)
        return cls(engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_t, _e, _s = schema.trials, schema.epochs, schema.studies
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """A summary of a study.

    ``num_trials`` counts trials by state. ``asked_epochs`` and ``reached_epochs`` are sums over its
    trials. ``trained_epochs`` and ``seconds`` count only what its own runs trained. ``metrics`` and
    ``modes`` are its objectives. ``state`` is "interrupted" if the study was running and its
    process is gone.
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


class StudyViews:
    """Summaries of all studies, and stamps that tell whether anything has changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def stamp(self, study: int | None = None) -> str | None:
        """Return a short text that changes whenever something is written about a study.

        If ``study`` is None, it changes with writes about any study. If there is no such study,
        the result is None.
        """
        plans, log, stages = schema.plans, schema.log, schema.stages
        query = select(_s.c.id, _s.c.plan, _s.c.state, plans.c.revision).join(plans)
        last = select(func.max(log.c.id))
        ended = select(func.max(stages.c.id))
        if study is not None:
            query, last = query.where(_s.c.id == study), last.where(log.c.study == study)
            ended = ended.where(
                stages.c.plan == select(_s.c.plan).where(_s.c.id == study).scalar_subquery()
            )
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(_s.c.id)).all()
            if study is not None and not rows:
                return None
            counts = select(last.scalar_subquery(), ended.scalar_subquery())
            states = standing(connection, {row.id: row.state for row in rows}, clock=_CLOCK)
            of_studies = [(row.id, row.plan, row.revision, states[row.id]) for row in rows]
            known = of_studies, tuple(connection.execute(counts).one())
        return blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def list(self) -> Sequence[StudyView]:
        """Return all studies, oldest first."""
        return self._studies(None)

    def get(self, study: int) -> StudyView | None:
        """Return the study with an id, or None."""
        return next(iter(self._studies(study)), None)

    def _studies(self, study: int | None) -> Sequence[StudyView]:
        with reading(self._engine) as connection:
            base = connection.execute(_only(_base(), _s.c.id, study)).all()
            states = standing(connection, {row.id: row.state for row in base}, clock=_CLOCK)
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
                state=states[row.id],
                trained=trained.get(row.id, (0, 0.0)),
                extremes=extremes.get(row.id, {}),
            )
            for row in base
        ]


def _only(query: Select[Any], column: ColumnElement[int], value: int | None) -> Select[Any]:
    return query if value is None else query.where(column == value)


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
    """Select the lowest and the highest value of each study, and the first trial with each."""
    ends = _only(
        select(
            _t.c.study,
            func.min(_t.c.value).label("low"),
            func.max(_t.c.value).label("high"),
        ).where(counting()),
        _t.c.study,
        study,
    )
    found = ends.group_by(_t.c.study).subquery()
    same = and_(
        _t.c.study == found.c.study,
        or_(_t.c.value == found.c.low, _t.c.value == found.c.high),
        counting(),
    )
    return (
        select(_t.c.study, _t.c.value, func.min(_t.c.number).label("number"))
        .join(found, same)
        .group_by(_t.c.study, _t.c.value)
    )


def _view(
    row: Row[Any],
    counts: Sequence[Row[Any]],
    *,
    state: str,
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
        state=state,
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
