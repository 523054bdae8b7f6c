"""Access to the studies of a store."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    case,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from thrifty.core import Artifact, Clock, StudyMismatchError, StudyNotFoundError, plain_text
from thrifty.space import config_from_json, config_to_json

from . import _schema as schema
from ._acts import queued, write_act, write_applied
from ._coordination import ALIVE, check_exists, lock_plan, standing
from ._engine import consistent_read, fetch, user_errors
from ._epoch_times import WorkerUse, last_attributes, mean_curve, path_to, stored_unit, worker_use
from ._plans import news_of, threads_of
from ._records import (
    ActApplied,
    LogRecord,
    PriorRecord,
    Remaining,
    StudyInfo,
    StudyRecords,
    StudySnapshot,
    StudySummary,
    TrialEnqueued,
    TrialRecord,
    artifacts_by_name,
    attributes_of,
    nodes_of_replicas,
    records_of,
)
from ._writer import write


_NEVER = 2**31 - 1
"""An epoch that no trial reaches: the largest value of a PostgreSQL integer column."""


class Studies:
    """The studies of a store: their specifications, states, trials and logs."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def create(
        self,
        name: str,
        *,
        plan: int,
        spec: Mapping[str, Any],
        enqueued: Sequence[Mapping[str, Any]] = (),
        priors: Sequence[PriorRecord] = (),
    ) -> StudyInfo:
        """Create a study in one transaction, with its queue and the trials that it learns from.

        ``enqueued`` are the configurations to try first, ``priors`` the trials of earlier studies.

        Raises:
            StudyMismatchError: There is a study of this name already.
        """
        row = {
            "name": name,
            "plan": plan,
            "spec": dict(spec),
            "state": "running",
            "created_at": self._clock.now(),
        }
        with self._creating(name) as connection:
            made = connection.execute(insert(schema.studies), row).inserted_primary_key
            assert made is not None
            if priors:
                rows = [_prior_row(made[0], number, p) for number, p in enumerate(priors)]
                connection.execute(insert(schema.priors), rows)
            queue = [
                TrialEnqueued(study=made[0], place=place, config=config)
                for place, config in enumerate(enqueued)
            ]
            write(connection, queue, at=self._clock.now())
        return self.get(name)

    @contextmanager
    def _creating(self, name: str) -> Iterator[Connection]:
        try:
            with user_errors(self._engine), self._engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise StudyMismatchError(
                f"there is a study {name!r} already; choose another name"
            ) from error

    def find(self, name: str) -> StudyInfo | None:
        """Return the study of a name, or None."""
        found = fetch(self._engine, _infos().where(schema.studies.c.name == name))
        return StudyInfo(**found[0]._asdict()) if found else None

    def get(self, name: str) -> StudyInfo:
        """Return the study of a name.

        Raises:
            StudyNotFoundError: There is no such study. The message names a similar one, or all.
        """
        found = self.find(name)
        if found is not None:
            return found
        names = [row.name for row in fetch(self._engine, select(schema.studies.c.name))]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(names) or 'none'}"
        raise StudyNotFoundError(f"the database has no study {name!r}; {hint}")

    def current(self, name: str) -> StudyInfo:
        """Return the study of a name; its state is "interrupted" if its process is gone.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        info = self.get(name)
        with user_errors(self._engine), self._engine.connect() as connection:
            states = standing(connection, {info.id: info.state}, clock=self._clock)
        return replace(info, state=states[info.id])

    def mark(self, name: str) -> tuple[Any, ...] | None:
        """Return a value that every write about a study or its plan changes; None if no study."""
        s, p, entries = schema.studies, schema.plans, schema.log
        last = select(func.max(entries.c.id)).where(entries.c.study == s.c.id).scalar_subquery()
        query = (
            select(s.c.id, s.c.created_at, s.c.state, s.c.batch, p.c.revision, last)
            .join(p, p.c.id == s.c.plan)
            .where(s.c.name == name)
        )
        rows = fetch(self._engine, query)
        return tuple(rows[0]) if rows else None

    def set_file(self, study: StudyInfo, file: str) -> StudyInfo:
        """Record the file that commands load to find a study.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            check_exists(connection, study)
            mine = schema.studies.c.id == study.id
            # locked, so that what another process extends meanwhile is not written over
            query = select(schema.studies.c.spec).where(mine).with_for_update()
            spec = {**connection.execute(query).scalar_one(), "file": file}
            connection.execute(update(schema.studies).where(mine).values(spec=spec))
        return replace(study, spec=spec)

    def extend(
        self,
        study: StudyInfo,
        *,
        algorithm: str,
        max_epochs: int,
        who: str,
        answers: Sequence[ActApplied] = (),
    ) -> StudyInfo:
        """Let a study go on with a larger algorithm of the same kind, in one transaction.

        A longer ``max_epochs`` is recorded as an act. A study that was done is stopped now, as
        there is more to train.

        Args:
            study: The study.
            algorithm: The algorithm as text.
            max_epochs: How long it trains a trial. The lengths before stay on record, as trials
                were made for them.
            who: The user and the machine that made it longer.
            answers: The requests that are applied with it.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        spec = {**study.spec, "algorithm": algorithm}
        before = study.spec["max_epochs"]
        if max_epochs > before:
            spec["max_epochs"] = max_epochs
            spec["earlier_max_epochs"] = [*study.spec.get("earlier_max_epochs", ()), before]
        with user_errors(self._engine), self._engine.begin() as connection:
            check_exists(connection, study)
            mine = schema.studies.c.id == study.id
            connection.execute(
                update(schema.studies).where(mine).values(spec=spec, state="stopped")
            )
            now = self._clock.now()
            if max_epochs > before:
                text = f"max_epochs from {before} to {max_epochs}"
                write_act(connection, study, "extend", trial=None, text=text, who=who, at=now)
            write_applied(connection, answers, at=now)
        return replace(study, spec=spec, state="stopped")

    def enqueue(
        self,
        study: StudyInfo,
        choose: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Record configurations to try, while no other process can.

        Args:
            study: The study that tries them.
            choose: A function that gets the recorded configurations and returns those to add.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            lock_plan(connection, study.plan)
            check_exists(connection, study)
            known = enqueued_since(connection, study.id, 0)
            fresh = [
                TrialEnqueued(study=study.id, place=place, config=config)
                for place, config in enumerate(choose(known), start=len(known))
            ]
            write(connection, fresh, at=self._clock.now())

    def failures(self, study: int) -> dict[int, tuple[str, str, str]]:
        """Return kind, message and traceback of each failed trial, by number."""
        t = schema.trials
        query = (
            select(t.c.number, t.c.error)
            .where(t.c.study == study, t.c.state == "failed")
            .order_by(t.c.number)
        )
        return {row.number: _error(row.error) for row in fetch(self._engine, query)}

    def load(self, study: int) -> StudyRecords:
        """Return all trials of a study, and its log in chronological order."""
        with consistent_read(self._engine) as connection:
            return _records(connection, study)

    def snapshot(self, study: StudyInfo) -> StudySnapshot:
        """Return all records of a study and of its plan, as they were at one moment.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
        """
        with consistent_read(self._engine) as connection:
            check_exists(connection, study)
            return StudySnapshot(
                threads=threads_of(connection, study.plan),
                plan=news_of(connection, study.plan),
                study=_records(connection, study.id),
                priors=_priors(connection, study.id),
            )

    def enqueued(self, study: int) -> Sequence[dict[str, Any]]:
        """Return all configurations that were ever enqueued, in order."""
        with user_errors(self._engine), self._engine.connect() as connection:
            return enqueued_since(connection, study, 0)

    def priors(self, study: int) -> Sequence[PriorRecord]:
        """Return the trials of earlier studies that the study was given when it was made."""
        with user_errors(self._engine), self._engine.connect() as connection:
            return _priors(connection, study)

    def made(self) -> dict[int, StudyInfo]:
        """Return all studies, by id."""
        rows = fetch(self._engine, _infos().order_by(schema.studies.c.id))
        return {row.id: StudyInfo(**row._asdict()) for row in rows}

    def list(self) -> Sequence[StudySummary]:
        """Return summaries of all studies, oldest first."""
        with consistent_read(self._engine) as connection:
            return self._summaries(connection, select(schema.studies))

    def summary(self, name: str) -> StudySummary:
        """Return the summary of one study.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        info = self.get(name)
        with consistent_read(self._engine) as connection:
            check_exists(connection, info)
            query = select(schema.studies).where(schema.studies.c.id == info.id)
            return self._summaries(connection, query)[0]

    def _summaries(self, connection: Connection, query: Select[Any]) -> Sequence[StudySummary]:
        rows = connection.execute(query.order_by(schema.studies.c.id)).all()
        written = {row.id: row.state for row in rows}
        states = standing(connection, written, clock=self._clock)
        return [_summary(connection, row, state=states[row.id]) for row in rows]

    def curves(self, study: int, metric: str) -> dict[int, tuple[float, ...]]:
        """Return a metric of each trial after epochs ``1 .. reached``, by trial number.

        If the study has several seeds, the values are means over these.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        several = self.seed_curves(study, metric)
        return {number: _means(curves) for number, curves in several.items()}

    def seed_curves(self, study: int, metric: str) -> dict[int, Sequence[tuple[float, ...]]]:
        """Return the curves of a metric for each seed of each trial, by trial number.

        The values are those of the nodes on the path from the root to the trial's node.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        n, e, t = schema.nodes, schema.epochs, schema.trials
        plan_of = select(schema.studies.c.plan).where(schema.studies.c.id == study)
        with consistent_read(self._engine) as connection:
            plan = connection.execute(plan_of).scalar()
            if plan is None:
                raise StudyNotFoundError(
                    f"the database has no study with the id {study}; look up the id by its name"
                )
            nodes = select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == plan)
            ancestry = {row.node: (row.parent, row.start) for row in connection.execute(nodes)}
            epochs = select(e.c.node, e.c.epoch, e.c.metrics).where(e.c.plan == plan)
            values = {
                (row.node, row.epoch): json.loads(row.metrics).get(metric)
                for row in connection.execute(epochs)
            }
            trials = connection.execute(
                select(t.c.number, t.c.node, t.c.reached, t.c.replicas)
                .where(t.c.study == study)
                .order_by(t.c.number)
            ).all()
        return {
            number: [
                _curve(node, reached, ancestry=ancestry, values=values)
                for node in (first, *nodes_of_replicas(others))
            ]
            for number, first, reached, others in trials
        }

    def last_metrics(self, study: StudyInfo) -> dict[int, Mapping[str, float]]:
        """Return all metrics of each trial at the epoch that it has reached, by trial number.

        Trials that have not reported are left out. With several seeds, metrics are means.
        """
        n, e, t = schema.nodes, schema.epochs, schema.trials
        with consistent_read(self._engine) as connection:
            nodes = select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == study.plan)
            origins = {row.node: (row.parent, row.start) for row in connection.execute(nodes)}
            trials = connection.execute(
                select(t.c.number, t.c.node, t.c.reached, t.c.replicas)
                .where(t.c.study == study.id, t.c.reached > 0)
                .order_by(t.c.number)
            ).all()
            places = {
                number: [
                    next(p for p in path_to(end, reached, origins=origins) if p[1] == reached)
                    for end in (node, *nodes_of_replicas(others))
                ]
                for number, node, reached, others in trials
            }
            wanted = {place for own in places.values() for place in own}
            epochs = select(e.c.node, e.c.epoch, e.c.metrics).where(e.c.plan == study.plan)
            metrics = {
                (row.node, row.epoch): json.loads(row.metrics)
                for row in connection.execute(epochs)
                if (row.node, row.epoch) in wanted
            }
        return {
            number: mean_curve([[metrics[place]] for place in own])[0]
            for number, own in places.items()
            if all(place in metrics for place in own)
        }

    def user_attrs(self, study: int) -> dict[int, dict[str, Any]]:
        """Return the user attributes of each trial up to the epoch it has reached, by number.

        Trials without attributes are left out. With several seeds, the first one counts.
        """
        return self._logged(study, schema.epochs.c.attributes, read=attributes_of)

    def artifacts(self, study: int) -> dict[int, dict[str, Artifact]]:
        """Return the artifacts of each trial by name, as ``user_attrs`` does."""
        return self._logged(study, schema.epochs.c.artifacts, read=artifacts_by_name)

    def _logged(
        self, study: int, column: Column[str], *, read: Callable[[str], Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return what epochs keep in a column, along the way to each trial; the last counts."""
        n, e, t = schema.nodes, schema.epochs, schema.trials
        plan = select(schema.studies.c.plan).where(schema.studies.c.id == study).scalar_subquery()
        with consistent_read(self._engine) as connection:
            stored: dict[int, dict[int, Mapping[str, Any]]] = {}
            for node, epoch, text in connection.execute(
                select(e.c.node, e.c.epoch, column).where(e.c.plan == plan, column.is_not(None))
            ):
                stored.setdefault(node, {})[epoch] = read(text)
            if not stored:
                return {}
            nodes = select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == plan)
            origins = {row.node: (row.parent, row.start) for row in connection.execute(nodes)}
            trials = connection.execute(
                select(t.c.number, t.c.node, t.c.reached)
                .where(t.c.study == study, t.c.reached > 0)
                .order_by(t.c.number)
            ).all()
        found = {
            number: last_attributes(path_to(node, reached, origins=origins), stored)
            for number, node, reached in trials
        }
        return {number: attributes for number, attributes in found.items() if attributes}

    def num_common(self, one: StudyInfo, two: StudyInfo) -> int:
        """Return how many epochs of their plan trials of both studies have reached."""
        n, t = schema.nodes, schema.trials
        with consistent_read(self._engine) as connection:
            nodes = select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == one.plan)
            origins = {row.node: (row.parent, row.start) for row in connection.execute(nodes)}
            passed: dict[int, dict[int, int]] = {one.id: {}, two.id: {}}
            for study, first, reached, others in connection.execute(
                select(t.c.study, t.c.node, t.c.reached, t.c.replicas).where(
                    t.c.study.in_(passed), t.c.reached > 0
                )
            ):
                for end in (first, *nodes_of_replicas(others)):
                    for node, last in path_to(end, reached, origins=origins):
                        passed[study][node] = max(passed[study].get(node, 0), last)
        mine, theirs = passed[one.id], passed[two.id]
        return sum(
            max(0, min(mine[node], theirs[node]) - origins[node][1])
            for node in mine.keys() & theirs.keys()
        )

    def workers(self, study: StudyInfo) -> Sequence[WorkerUse]:
        """Return what each worker has used that trained for the plan of a study, by name."""
        table = schema.stages
        query = (
            select(
                table.c.worker,
                table.c.started_at,
                table.c.seconds,
                table.c.device,
                table.c.peak_bytes,
            )
            .where(table.c.plan == study.plan)
            .order_by(table.c.started_at, table.c.id)
        )
        stages: dict[str, list[Any]] = {}
        for row in fetch(self._engine, query):
            stages.setdefault(row.worker, []).append(row)
        return [worker_use(worker, stages[worker]) for worker in sorted(stages)]

    def trained_to(self, study: int, *, state: str) -> dict[int, int]:
        """Return the last trained epoch of each trial in a state, by number; 0 before the first.

        A trial has reported less if its training was stopped between two reports.
        """
        with consistent_read(self._engine) as connection:
            return _trained_to(connection, study, state=state)


def _trained_to(connection: Connection, study: int, *, state: str) -> dict[int, int]:
    n, e, t = schema.nodes, schema.epochs, schema.trials
    plan = select(schema.studies.c.plan).where(schema.studies.c.id == study).scalar_subquery()
    trials = connection.execute(
        select(t.c.number, t.c.node, t.c.target)
        .where(t.c.study == study, t.c.state == state)
        .order_by(t.c.number)
    ).all()
    if not trials:
        return {}
    ancestry = {
        row.node: (row.parent, row.start)
        for row in connection.execute(
            select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == plan)
        )
    }
    last_epochs = select(e.c.node, func.max(e.c.epoch).label("last"))
    last = {
        row.node: row.last
        for row in connection.execute(last_epochs.where(e.c.plan == plan).group_by(e.c.node))
    }
    return {
        number: _last_epoch(node, target, ancestry=ancestry, last=last)
        for number, node, target in trials
    }


def _last_epoch(
    node: int | None,
    target: int,
    *,
    ancestry: Mapping[int, tuple[int | None, int]],
    last: Mapping[int, int],
) -> int:
    while node is not None and node in ancestry:
        parent, start = ancestry[node]
        if node in last and target > start:
            return min(last[node], target)
        node, target = parent, min(target, start)
    return 0


def _infos() -> Select[Any]:
    t = schema.studies
    return select(t.c.id, t.c.name, t.c.plan, t.c.spec, t.c.state, t.c.created_at)


def _records(connection: Connection, study: int) -> StudyRecords:
    t, entries = schema.trials, schema.log
    trials = connection.execute(select(t).where(t.c.study == study).order_by(t.c.number)).all()
    log = connection.execute(
        select(entries).where(entries.c.study == study).order_by(entries.c.id)
    ).all()
    return StudyRecords(
        trials=records_of(
            TrialRecord,
            trials,
            config=config_from_json,
            parent=_pair,
            error=_error,
            replicas=nodes_of_replicas,
        ),
        log=records_of(LogRecord, log, config=_config),
    )


def enqueued_since(connection: Connection, study: int, num_known: int) -> list[dict[str, Any]]:
    """Return the enqueued configurations of a study but for the first ``num_known``, in order."""
    entries = schema.log
    query = (
        select(entries.c.config)
        .where(entries.c.study == study, entries.c.kind == "enqueued", entries.c.trial >= num_known)
        .order_by(entries.c.id)
    )
    return [config_from_json(config) for config in connection.execute(query).scalars()]


def _priors(connection: Connection, study: int) -> list[PriorRecord]:
    table = schema.priors
    query = select(table).where(table.c.study == study).order_by(table.c.number)
    rows = connection.execute(query).all()
    return records_of(PriorRecord, rows, config=config_from_json, metrics=json.loads)


def _curve(
    node: int | None,
    epoch: int,
    *,
    ancestry: Mapping[int, tuple[int | None, int]],
    values: Mapping[tuple[int, int], float],
) -> tuple[float, ...]:
    out: list[float] = []
    while node is not None:
        parent, start = ancestry[node]
        out.extend(values[node, e] for e in range(epoch, start, -1))
        node, epoch = parent, min(epoch, start)
    return tuple(out[::-1])


def _means(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    if len(curves) == 1:
        return tuple(curves[0])
    return tuple(sum(v / len(curves) for v in epoch) for epoch in zip(*curves, strict=True))


def _config(stored: Any) -> dict[str, Any] | None:
    return None if stored is None else config_from_json(stored)


def _pair(stored: Sequence[int] | None) -> tuple[int, int] | None:
    return None if stored is None else (stored[0], stored[1])


def _error(stored: Sequence[str] | None) -> tuple[str, str, str]:
    """Return kind, message and traceback as printable text; empty if the trial has not failed."""
    kind, message, traceback = stored or ("", "", "")
    return kind, plain_text(message, lines=True), plain_text(traceback, lines=True)


def _prior_row(study: int, number: int, prior: PriorRecord) -> dict[str, Any]:
    return {
        "study": study,
        "number": number,
        "config": config_to_json(prior.config),
        "state": prior.state,
        "target": prior.target,
        "metrics": json.dumps([dict(metrics) for metrics in prior.metrics]),
    }


def _summary(connection: Connection, study: Row[Any], *, state: str) -> StudySummary:
    t, e, entries = schema.trials, schema.epochs, schema.log
    counts = connection.execute(
        select(t.c.state, func.count(), func.sum(t.c.target))
        .where(t.c.study == study.id)
        .group_by(t.c.state)
    ).all()
    num_done = connection.execute(
        select(func.count()).where(
            t.c.study == study.id,
            t.c.state == "waiting",
            t.c.reached >= func.coalesce(t.c.horizon, study.spec.get("max_epochs", _NEVER)),
        )
    ).scalar_one()
    best = _best(connection, study)
    num_epochs, plan_seconds = connection.execute(
        select(func.count(), func.coalesce(func.sum(e.c.seconds + e.c.again_s), 0.0)).where(
            e.c.plan == study.plan
        )
    ).one()
    num_trained, seconds = connection.execute(
        select(func.coalesce(func.sum(trained_times()), 0), func.coalesce(spent_s(), 0.0)).where(
            e.c.plan == study.plan, e.c.study == study.id
        )
    ).one()
    last = connection.execute(
        select(entries.c.at)
        .where(entries.c.study == study.id)
        .order_by(entries.c.id.desc())
        .limit(1)
    ).scalar()
    num_seeds = study.spec.get("seeds", 1)
    return StudySummary(
        id=study.id,
        name=study.name,
        state=state,
        metric=_first(study.spec.get("metric", "")),
        num_trials={each: count for each, count, _ in counts},
        num_done=num_done,
        best_value=best.value,
        best_trial=best.number,
        best_epochs=best.epochs,
        num_infeasible=best.num_infeasible,
        trial_epochs=num_seeds * sum(targets for _, _, targets in counts),
        plan_epochs=num_epochs,
        plan_seconds=plan_seconds,
        trained_epochs=int(num_trained),
        seconds=seconds,
        last_activity=last,
        remaining=_remaining(connection, study, state=state, num_seeds=num_seeds),
        unit=stored_unit(study.spec),
        num_seeds=num_seeds,
    )


def trained_times() -> ColumnElement[int]:
    """Select how often an epoch was trained: 0 if its state was only evaluated again."""
    e = schema.epochs
    return case((e.c.evaluated.is_(True), 0), else_=1) + e.c.again


def spent_s() -> ColumnElement[float]:
    """Select the seconds of training epochs, each time that they were trained."""
    e = schema.epochs
    return func.sum(e.c.seconds + e.c.again_s)


def _remaining(connection: Connection, study: Row[Any], *, state: str, num_seeds: int) -> Remaining:
    t, spec = schema.trials, study.spec
    end = func.coalesce(t.c.horizon, spec.get("max_epochs", 0))
    num_trials, left = connection.execute(
        select(func.count(), func.coalesce(func.sum(end - t.c.reached), 0)).where(
            t.c.study == study.id, t.c.state.in_(("running", "waiting")), t.c.reached < end
        )
    ).one()
    if state not in ALIVE:
        running = select(t.c.number, t.c.reached).where(
            t.c.study == study.id, t.c.state == "running"
        )
        trained = _trained_to(connection, study.id, state="running")
        # What a stopped trial has trained since its last report is kept.
        left -= sum(
            max(0, trained[number] - reached) for number, reached in connection.execute(running)
        )
    requested = [act.max_epochs for act in queued(connection, study.id)]
    return Remaining(
        file=spec.get("file"),
        max_epochs=spec.get("max_epochs"),
        raised_from=next(iter(spec.get("earlier_max_epochs", ())[-1:]), None),
        num_trials=num_trials,
        most_epochs=num_seeds * int(left),
        num_enqueued=_num_untried(connection, study.id),
        requested_max_epochs=max((n for n in requested if n is not None), default=None),
    )


def _num_untried(connection: Connection, study: int) -> int:
    """Return how many enqueued configurations no trial has, as ``History`` counts them."""
    t, entries = schema.trials, schema.log
    if not enqueued_since(connection, study, 0):
        return 0
    trials = select(t.c.number, t.c.config).where(t.c.study == study)
    untold = {row.number: row.config for row in connection.execute(trials)}
    waiting: list[Any] = []
    moves = select(entries.c.kind, entries.c.trial, entries.c.config).where(
        entries.c.study == study, entries.c.kind.in_(("enqueued", "asked"))
    )
    for kind, number, config in connection.execute(moves.order_by(entries.c.id)):
        if kind == "enqueued":
            waiting.append(config)
        elif untold.pop(number, None) == next(iter(waiting), object()):
            waiting.pop(0)
    return len(waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    """The best trial that keeps the constraints; how many trials break them if none does."""

    number: int | None = None
    value: float | None = None
    epochs: int | None = None
    num_infeasible: int = 0


def _best(connection: Connection, study: Row[Any]) -> _Best:
    t = schema.trials
    scored = (t.c.study == study.id, t.c.state != "failed", t.c.value.is_not(None))
    # Of several objectives take the first, because rungs compare that one.
    mode = _first(study.spec.get("mode", ""))
    order = t.c.value.asc() if mode == "min" else t.c.value.desc()
    best = connection.execute(
        select(t.c.number, t.c.value)
        .where(*scored, func.coalesce(t.c.violation, 0.0) == 0.0)
        .order_by(order, t.c.number)
        .limit(1)
    ).first()
    if best is None:
        num = connection.execute(select(func.count()).where(*scored, t.c.violation > 0.0))
        return _Best(num_infeasible=num.scalar_one())
    # The index of the query above does not hold this column.
    epochs = connection.execute(
        select(t.c.reached).where(t.c.study == study.id, t.c.number == best.number)
    ).scalar()
    return _Best(number=best.number, value=best.value, epochs=epochs)


def _first(value: Any) -> str:
    return str(value[0] if isinstance(value, list) else value)
