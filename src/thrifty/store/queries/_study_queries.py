"""Queries about studies, the database, and what is trained for a plan."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

from sqlalchemy import ColumnElement, Engine, Row, Select, and_, case, func, or_, select

from thrifty.core import Artifact, SystemClock, UsageError
from thrifty.store import _schema as schema
from thrifty.store._acts import Act
from thrifty.store._address import redact_url
from thrifty.store._coordination import standing
from thrifty.store._engine import fetch, forbid_writing, open_engine, user_errors
from thrifty.store._epoch_times import AttributesByNode, last_attributes, path_to
from thrifty.store._records import artifacts_by_name, attributes_of, records_of
from thrifty.store._reports import shown_state
from thrifty.store._studies import spent_s, trained_times
from thrifty.store._trash import Deleted, Trash
from thrifty.store._trial_lines import TrialLine, lines_along

from ._trial_queries import TrialSamples, TrialViews, counting


class Views:
    """Read-only views of a database that other processes write.

    ``studies`` are summaries of the studies, ``trials`` is the table of their trials, ``samples``
    are as many trials as a chart can show, and ``plans`` is what was trained.

    >>> from thrifty.store import Store
    >>> import tempfile
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/t.db"
    >>> with Store.open(url) as store:
    ...     plan = store.plans.open("what is trained", task="Digits").id
    ...     made = store.studies.create("first", plan=plan, spec={"metric": "loss", "mode": "min"})
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

    ``num_trials`` counts trials by their state in the database, and ``num_done`` those that have
    reached the end of their training. ``asked_epochs`` and ``reached_epochs`` are sums over its
    trials, each with all of its seeds. ``trained_epochs`` and ``seconds`` count only what its own
    runs trained, epochs that were trained again included. ``metrics`` and ``modes`` are its
    objectives. ``state`` is "interrupted" if the study was running and its process is gone.
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
    num_done: int
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
        plans, log, stages, acts = schema.plans, schema.log, schema.stages, schema.acts
        query = select(_s.c.id, _s.c.plan, _s.c.state, plans.c.revision).join(plans)
        last = select(func.max(log.c.id))
        ended = select(func.max(stages.c.id))
        asked = select(func.count(acts.c.id), func.count(acts.c.applied_at))
        in_trash = select(func.count(), func.max(schema.trash.c.id)).select_from(schema.trash)
        if study is not None:
            query, last = query.where(_s.c.id == study), last.where(log.c.study == study)
            asked = asked.where(acts.c.study == study)
            ended = ended.where(
                stages.c.plan == select(_s.c.plan).where(_s.c.id == study).scalar_subquery()
            )
        with user_errors(self._engine), self._engine.connect() as connection:
            rows = connection.execute(query.order_by(_s.c.id)).all()
            if study is not None and not rows:
                return None
            counts = select(last.scalar_subquery(), ended.scalar_subquery())
            states = standing(connection, {row.id: row.state for row in rows}, clock=_CLOCK)
            of_studies = [(row.id, row.plan, row.revision, states[row.id]) for row in rows]
            of_acts = tuple(connection.execute(asked).one())
            deleted = tuple(connection.execute(in_trash).one()) if study is None else ()
            known = of_studies, tuple(connection.execute(counts).one()), of_acts, deleted
        return blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def acts(self, study: int) -> Sequence[Act]:
        """Return all requests to a study, in order."""
        table = schema.acts
        query = select(table).where(table.c.study == study).order_by(table.c.id)
        return records_of(Act, fetch(self._engine, query))

    def deleted(self) -> Sequence[Deleted]:
        """Return all deleted studies that can be restored, in the order of their deletion."""
        return Trash(self._engine, _CLOCK).list()

    def list(self) -> Sequence[StudyView]:
        """Return all studies, oldest first."""
        return self._studies(None)

    def get(self, study: int) -> StudyView | None:
        """Return the study with an id, or None."""
        return next(iter(self._studies(study)), None)

    def _studies(self, study: int | None) -> Sequence[StudyView]:
        with user_errors(self._engine), self._engine.connect() as connection:
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
    """Select how many trials are alike in study, state, epochs reached and horizon.

    Whether they are done also depends on the ``max_epochs`` of their study.
    """
    alike = (_t.c.study, _t.c.state, _t.c.reached, _t.c.horizon)
    return select(
        *alike, func.count().label("trials"), func.sum(_t.c.target).label("asked")
    ).group_by(*alike)


def _trained() -> Select[Any]:
    return select(
        _e.c.study, func.sum(trained_times()).label("epochs"), spent_s().label("seconds")
    ).group_by(_e.c.study)


def _extremes(study: int | None) -> Select[Any]:
    """Select the lowest and the highest value of each study, and the first trial with each."""
    ends = _only(
        select(
            _t.c.study, func.min(_t.c.value).label("low"), func.max(_t.c.value).label("high")
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
    num_seeds = row.spec.get("seeds", 1)
    num_trials: Counter[str] = Counter()
    for count in counts:
        num_trials[count.state] += count.trials
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
        num_trials=num_trials,
        num_done=_num_done(counts, max_epochs=row.spec.get("max_epochs")),
        asked_epochs=num_seeds * sum(count.asked for count in counts),
        reached_epochs=num_seeds * sum(count.reached * count.trials for count in counts),
        trained_epochs=trained[0],
        seconds=trained[1] if math.isfinite(trained[1]) else 0.0,
        best_value=best,
        best_trial=None if best is None else extremes[best],
    )


def _num_done(counts: Sequence[Row[Any]], *, max_epochs: object) -> int:
    last = max_epochs if isinstance(max_epochs, int) else None
    done = 0
    for count in counts:
        horizon = last if count.horizon is None else count.horizon
        if shown_state(count.state, reached=count.reached, horizon=horizon) == "done":
            done += count.trials
    return done


def _names(spec: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = spec.get(key, "")
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


_t, _n, _e = schema.trials, schema.nodes, schema.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Nodes on the paths from the root to some nodes.

    ``origins`` gives parent and start of each node; ``metrics`` is by node and epoch.
    ``attributes`` has the user attributes of epochs in which some were set, and ``artifacts`` the
    artifacts, by name. ``seconds`` is the time of each epoch.
    """

    origins: Mapping[int, tuple[int | None, int]]
    metrics: Mapping[tuple[int, int], Mapping[str, float]]
    attributes: AttributesByNode = field(default_factory=dict)
    artifacts: AttributesByNode = field(default_factory=dict)
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def spent(self, nodes: Sequence[int], reached: int) -> float | None:
        """Return the seconds of all known epochs on the paths to nodes; None if none is known."""
        ways = (self.owners(node, reached).items() for node in nodes)
        places = {(node, epoch) for way in ways for epoch, node in way}
        known = [self.seconds[place] for place in places if place in self.seconds]
        return sum(known) if known else None

    def user_attrs(self, node: int, reached: int) -> dict[str, Any]:
        """Return the user attributes up to ``reached`` on the path to a node."""
        return last_attributes(path_to(node, reached, origins=self.origins), self.attributes)

    def artifacts_of(self, node: int, reached: int) -> dict[str, Artifact]:
        """Return the artifacts up to ``reached`` on the path to a node, by name."""
        return last_attributes(path_to(node, reached, origins=self.origins), self.artifacts)

    def curve(self, node: int, reached: int) -> list[tuple[int, Mapping[str, float]]]:
        """Return the known epochs up to ``reached`` on the path to a node, with their metrics."""
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

    def owners(self, node: int, reached: int) -> dict[int, int]:
        """Return the node that holds the state after each epoch up to ``reached``, by epoch."""
        found: dict[int, int] = {}
        at: int | None = node
        while at is not None and at in self.origins:
            parent, start = self.origins[at]
            found |= dict.fromkeys(range(start + 1, reached + 1), at)
            at, reached = parent, min(reached, start)
        return found

    def mean_curve(
        self, nodes: Sequence[int], reached: int
    ) -> list[tuple[int, Mapping[str, float]]]:
        """Return the means over several nodes of the epochs that are known for all of them."""
        first, *others = (dict(self.curve(node, reached)) for node in nodes)
        if not others:
            return list(first.items())
        return [
            (epoch, _means([first[epoch], *(other[epoch] for other in others)]))
            for epoch in first
            if all(epoch in other for other in others)
        ]


def _means(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = [name for name in several[0] if all(name in metrics for metrics in several)]
    return {name: sum(m[name] / len(several) for m in several) for name in names}


class PlanViews:
    """Views of the nodes of a plan, of where trials end on them, and of the trained stages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def identity(self, plan: int) -> str:
        """Return the identity of a plan, which is the name of its folder of checkpoints."""
        query = select(schema.plans.c.identity).where(schema.plans.c.id == plan)
        return str(fetch(self._engine, query)[0].identity)

    def kept(self, plan: int, nodes: Sequence[int]) -> set[tuple[int, int]]:
        """Return the node and the epoch of each kept state of some nodes."""
        table = schema.checkpoints
        query = select(table.c.node, table.c.epoch).where(
            table.c.plan == plan, table.c.node.in_(set(nodes))
        )
        return {(row.node, row.epoch) for row in fetch(self._engine, query)}

    def paths(self, plan: int, nodes: Sequence[int], *, every: int = 1) -> Paths:
        """Return the nodes on the paths to ``nodes``, with metrics at multiples of ``every``."""
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
        columns = (_e.c.epoch, _e.c.metrics, _e.c.attributes, _e.c.artifacts, _e.c.seconds)
        query = select(path, *columns).outerjoin(
            _e, and_(_e.c.plan == plan, _e.c.node == path.c.node, _e.c.epoch % every == 0)
        )
        origins: dict[int, tuple[int | None, int]] = {}
        metrics: dict[tuple[int, int], Mapping[str, float]] = {}
        attributes: dict[int, dict[int, Mapping[str, Any]]] = {}
        artifacts: dict[int, dict[int, Mapping[str, Any]]] = {}
        seconds: dict[tuple[int, int], float] = {}
        for node, parent, start, epoch, text, said, logged, spent in fetch(self._engine, query):
            origins[node] = (parent, start)
            if epoch is not None:
                metrics[node, epoch] = json.loads(text)
                seconds[node, epoch] = spent
            if said is not None:
                attributes.setdefault(node, {})[epoch] = attributes_of(said)
            if logged is not None:
                artifacts.setdefault(node, {})[epoch] = artifacts_by_name(logged)
        return Paths(
            origins=origins,
            metrics=metrics,
            attributes=attributes,
            artifacts=artifacts,
            seconds=seconds,
        )

    def log_lines(
        self,
        plan: int,
        path: Sequence[tuple[int, int]],
        *,
        origins: Mapping[int, tuple[int | None, int]],
    ) -> list[TrialLine]:
        """Return what was logged along a path of nodes, each given with its last epoch."""
        with user_errors(self._engine), self._engine.connect() as connection:
            return lines_along(connection, plan, path, origins=origins)

    def tree(self, plan: int) -> Sequence[Row[Any]]:
        """Return all nodes of a plan, ordered by number.

        Rows have node, parent, start and last (the last trained epoch).
        """
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
        return fetch(self._engine, query)

    def ends(self, study: int) -> Sequence[Row[Any]]:
        """Return the positions at which trials of a study end, or will end while they run.

        Rows have node, epoch, trials, failed, low, high and first (the lowest trial number).
        """
        epoch = case((_t.c.state == "running", _t.c.target), else_=_t.c.reached).label("epoch")
        value = case((counting(), _t.c.value))
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
        return fetch(self._engine, query)

    def extent(self, plan: int) -> Row[Any]:
        """Return number, began, ended and workers over all stages that were trained for a plan."""
        g = schema.stages
        query = select(
            func.count().label("number"),
            func.min(g.c.started_at).label("began"),
            func.max(g.c.started_at + g.c.seconds).label("ended"),
            func.count(g.c.worker.distinct()).label("workers"),
        ).where(g.c.plan == plan)
        extent: Row[Any] = fetch(self._engine, query)[0]
        return extent

    def stages(
        self, plan: int, *, since: float | None, until: float | None, limit: int
    ) -> tuple[int, Sequence[Row[Any]]]:
        """Return how many stages overlap a time span, and the longest of them, sorted by start."""
        g = schema.stages
        inside = [g.c.plan == plan]
        if since is not None:
            inside.append(g.c.started_at + g.c.seconds >= since)
        if until is not None:
            inside.append(g.c.started_at <= until)
        longest = select(g.c.id).where(*inside).order_by(g.c.seconds.desc(), g.c.id).limit(limit)
        query = select(g).where(g.c.id.in_(longest)).order_by(g.c.started_at, g.c.id)
        with user_errors(self._engine), self._engine.connect() as connection:
            total = connection.execute(select(func.count()).select_from(g).where(*inside))
            return int(total.scalar_one()), connection.execute(query).all()
