"""Views of what is trained for a plan: paths through its nodes, their tree, stages over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Row, Select, and_, case, func, select

from thrifty.store import _schema as schema

from ._trial_queries import counting, reading


_t, _n, _e = schema.trials, schema.nodes, schema.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Nodes on the paths from the root to some nodes.

    ``origins`` gives parent and start of each node; ``metrics`` is by node and epoch.
    """

    origins: Mapping[int, tuple[int | None, int]]
    metrics: Mapping[tuple[int, int], Mapping[str, float]]

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


class PlanViews:
    """Views of the nodes of a plan, of where trials end on them, and of the trained stages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
        query = select(path, _e.c.epoch, _e.c.metrics).outerjoin(
            _e,
            and_(_e.c.plan == plan, _e.c.node == path.c.node, _e.c.epoch % every == 0),
        )
        origins: dict[int, tuple[int | None, int]] = {}
        metrics: dict[tuple[int, int], Mapping[str, float]] = {}
        with reading(self._engine) as connection:
            for node, parent, start, epoch, text in connection.execute(query):
                origins[node] = (parent, start)
                if epoch is not None:
                    metrics[node, epoch] = json.loads(text)
        return Paths(origins=origins, metrics=metrics)

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
        with reading(self._engine) as connection:
            return connection.execute(query).all()

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
        with reading(self._engine) as connection:
            return connection.execute(query).all()

    def extent(self, plan: int) -> Row[Any]:
        """Return number, began, ended and workers over all stages that were trained for a plan."""
        g = schema.stages
        query = select(
            func.count().label("number"),
            func.min(g.c.started_at).label("began"),
            func.max(g.c.started_at + g.c.seconds).label("ended"),
            func.count(g.c.worker.distinct()).label("workers"),
        ).where(g.c.plan == plan)
        with reading(self._engine) as connection:
            return connection.execute(query).one()

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
        longest = (
            select(g.c.id).where(*inside).order_by(g.c.seconds.desc(), g.c.id).limit(limit)
        )
        query = select(g).where(g.c.id.in_(longest)).order_by(g.c.started_at, g.c.id)
        with reading(self._engine) as connection:
            total = connection.execute(select(func.count()).select_from(g).where(*inside))
            return int(total.scalar_one()), connection.execute(query).all()
