"""Writing of records: one transaction for a batch, and one statement for each kind of row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Float, Table, bindparam, delete, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from thrifty.core import plain_text
from thrifty.space import config_to_json

from . import _schema as schema
from ._acts import write_applied
from ._coordination import next_revision
from ._records import (
    ActApplied,
    CheckpointAdded,
    CheckpointRemoved,
    EpochAgain,
    EpochRecord,
    NodeRecord,
    Record,
    RefusalRecord,
    StageRecord,
    StudyMoved,
    TrialAsked,
    TrialEnqueued,
    TrialFailed,
    TrialReported,
    TrialStopped,
)


Row = dict[str, Any]
TrialMove = TrialAsked | TrialStopped | TrialReported | TrialFailed
PlanRecord = NodeRecord | EpochRecord | EpochAgain | CheckpointAdded | CheckpointRemoved


def write(
    connection: Connection, records: Sequence[Record], *, at: float, shared: bool = False
) -> dict[int, int]:
    """Write a batch in a few statements, whatever its size; return the new revisions of its plans.

    ``shared`` says that other drivers may work on the plan. Then the revisions of the changed nodes
    are updated, too.
    """
    about_plans = [r for r in records if isinstance(r, PlanRecord)]
    # Do this first: it locks the plan, so that no other transaction writes until the commit.
    revisions = {
        plan: next_revision(connection, plan) for plan in sorted({r.plan for r in about_plans})
    }
    _nodes(connection, [r for r in records if isinstance(r, NodeRecord)], revisions)
    _epochs(connection, [r for r in records if isinstance(r, EpochRecord)], revisions)
    _again(connection, [r for r in records if isinstance(r, EpochAgain)], revisions)
    _checkpoints(
        connection,
        [r for r in records if isinstance(r, CheckpointAdded | CheckpointRemoved)],
        revisions,
    )
    _refusals(connection, [r for r in records if isinstance(r, RefusalRecord)], at=at)
    if shared:
        _touch(connection, about_plans, revisions)
    _stages(connection, [r for r in records if isinstance(r, StageRecord)])
    _trials(connection, [r for r in records if isinstance(r, TrialMove)])
    logged = [r for r in records if isinstance(r, TrialMove | TrialEnqueued)]
    if logged:
        connection.execute(insert(schema.log), [_log_entry(r, at) for r in logged])
    write_applied(connection, [r for r in records if isinstance(r, ActApplied)], at=at)
    for moved in (r for r in records if isinstance(r, StudyMoved)):
        mine = schema.studies.c.id == moved.study
        connection.execute(update(schema.studies).where(mine).values(state=moved.state))
    return revisions


def keep_first(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; ignore a row whose key exists already."""
    _on_conflict(connection, table, rows, replace=False)


def keep_last(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; a row whose key exists already replaces the old one."""
    _on_conflict(connection, table, rows, replace=True)


def _on_conflict(
    connection: Connection, table: Table, rows: Sequence[Row], *, replace: bool
) -> None:
    if not rows:
        return
    # SQLAlchemy has this statement only per dialect; its meaning is the same in both.
    dialect: Any = {"sqlite": sqlite, "postgresql": postgresql}[connection.dialect.name]
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    if replace:
        rest = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
        statement = statement.on_conflict_do_update(index_elements=keys, set_=rest)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    connection.execute(statement, list(rows))


def _touch(
    connection: Connection, records: Sequence[PlanRecord], revisions: Mapping[int, int]
) -> None:
    """Update the revisions of changed nodes, so that claims based on older revisions fail."""
    nodes = {(r.plan, _node_of(r)) for r in records if not isinstance(r, NodeRecord)}
    table = schema.nodes
    if nodes:
        statement = (
            update(table)
            .where(table.c.plan == bindparam("p"), table.c.node == bindparam("n"))
            .values(revision=bindparam("r"))
        )
        # Lock rows in the order of their keys, so that two writers never wait for each other.
        rows = [{"p": plan, "n": node, "r": revisions[plan]} for plan, node in sorted(nodes)]
        connection.execute(statement, rows)


def _node_of(record: EpochRecord | EpochAgain | CheckpointAdded | CheckpointRemoved) -> int:
    return record.ref.node if isinstance(record, CheckpointAdded) else record.node


def _nodes(
    connection: Connection, records: Sequence[NodeRecord], revisions: Mapping[int, int]
) -> None:
    rows = [
        {
            "plan": r.plan,
            "node": r.node,
            "parent": r.parent,
            "start": r.start,
            "config": config_to_json(r.config),
            "epochs": r.epochs,
            "replica": r.replica,
            "revision": revisions[r.plan],
        }
        for r in records
    ]
    keep_first(connection, schema.nodes, rows)


def _epochs(
    connection: Connection, records: Sequence[EpochRecord], revisions: Mapping[int, int]
) -> None:
    rows = [
        {
            "plan": r.plan,
            "node": r.node,
            "epoch": r.epoch,
            "metrics": json.dumps(dict(r.metrics)),
            "seconds": r.seconds,
            "worker": r.worker,
            "seconds_checks": r.seconds_checks,
            "seconds_alone": r.seconds_alone,
            "seconds_alone_low": r.seconds_alone_low,
            "seconds_alone_high": r.seconds_alone_high,
            "study": r.study,
            "evaluated": r.evaluated or None,
            "attributes": json.dumps(dict(r.attributes)) if r.attributes else None,
            "artifacts": json.dumps([each.to_json() for each in r.artifacts])
            if r.artifacts
            else None,
            "revision": revisions[r.plan],
        }
        for r in records
    ]
    keep_first(connection, schema.epochs, rows)


def _again(
    connection: Connection, records: Sequence[EpochAgain], revisions: Mapping[int, int]
) -> None:
    table = schema.epochs
    if not records:
        return
    statement = (
        update(table)
        .where(
            table.c.plan == bindparam("p"),
            table.c.node == bindparam("n"),
            table.c.epoch == bindparam("e"),
        )
        .values(
            again=table.c.again + 1,
            again_s=table.c.again_s + bindparam("s"),
            again_checks_s=table.c.again_checks_s + bindparam("c"),
            again_alone_s=table.c.again_alone_s + bindparam("a"),
            # The sum is NULL once a part of it is unknown.
            again_alone_low_s=table.c.again_alone_low_s + bindparam("l", type_=Float),
            again_alone_high_s=table.c.again_alone_high_s + bindparam("h", type_=Float),
            revision=bindparam("r"),
        )
    )
    rows = [
        {
            "p": r.plan,
            "n": r.node,
            "e": r.epoch,
            "s": r.seconds,
            "c": r.seconds_checks,
            "a": r.seconds_alone or 0.0,
            "l": r.seconds_alone if r.seconds_alone_low is None else r.seconds_alone_low,
            "h": r.seconds_alone if r.seconds_alone_high is None else r.seconds_alone_high,
            "r": revisions[r.plan],
        }
        for r in records
    ]
    connection.execute(statement, rows)


def _refusals(connection: Connection, records: Sequence[RefusalRecord], *, at: float) -> None:
    rows = [
        {
            "plan": r.plan,
            "key": r.key,
            "reason": plain_text(r.reason, lines=True),
            "study": r.study,
            "at": at,
        }
        for r in records
    ]
    keep_first(connection, schema.refusals, rows)


def _checkpoints(
    connection: Connection,
    records: Sequence[CheckpointAdded | CheckpointRemoved],
    revisions: Mapping[int, int],
) -> None:
    last: dict[tuple[int, int, int], Row | None] = {}
    for r in records:
        if isinstance(r, CheckpointRemoved):
            last[r.plan, r.node, r.epoch] = None
            continue
        last[r.plan, r.ref.node, r.ref.epoch] = {
            "plan": r.plan,
            "node": r.ref.node,
            "epoch": r.ref.epoch,
            "path": r.ref.path,
            "num_bytes": r.ref.num_bytes,
            "digest": r.ref.digest,
            "train_loss": r.ref.train_loss,
            "revision": revisions[r.plan],
        }
    keep_last(connection, schema.checkpoints, [row for row in last.values() if row is not None])
    gone = [{"p": p, "n": n, "e": e} for (p, n, e), row in last.items() if row is None]
    if gone:
        table = schema.checkpoints
        statement = delete(table).where(
            table.c.plan == bindparam("p"),
            table.c.node == bindparam("n"),
            table.c.epoch == bindparam("e"),
        )
        connection.execute(statement, gone)


def _stages(connection: Connection, records: Sequence[StageRecord]) -> None:
    if records:
        names = [c.name for c in schema.stages.columns if c.name != "id"]
        rows = [{name: getattr(r, name) for name in names} for r in records]
        for row in rows:
            # Some databases reject some characters.
            row["error"] = plain_text(row["error"], lines=True)
        connection.execute(insert(schema.stages), rows)


def _trials(connection: Connection, records: Sequence[TrialMove]) -> None:
    """Write trials, with all changes to a trial in this batch merged into one row."""
    fresh: dict[tuple[int, int], Row] = {}
    changed: dict[tuple[int, int], Row] = {}
    for r in records:
        key = (r.study, r.trial)
        if isinstance(r, TrialAsked) and r.config is not None:
            fresh[key] = _fresh_trial(r, r.config)
            continue
        row = fresh.get(key)
        (changed.setdefault(key, {}) if row is None else row).update(_changes(r))
    if fresh:
        connection.execute(insert(schema.trials), list(fresh.values()))
    by_columns: dict[tuple[str, ...], list[Row]] = {}
    for (study, trial), changes in changed.items():
        # Bound parameters must have names that differ from the columns that they set.
        values = {f"new_{name}": value for name, value in changes.items()}
        rows = by_columns.setdefault(tuple(sorted(changes)), [])
        rows.append({"in_study": study, "of_number": trial, **values})
    table = schema.trials
    for columns, rows in by_columns.items():
        statement = (
            update(table)
            .where(table.c.study == bindparam("in_study"), table.c.number == bindparam("of_number"))
            .values({name: bindparam(f"new_{name}") for name in columns})
        )
        connection.execute(statement, rows)


def _fresh_trial(asked: TrialAsked, config: Mapping[str, Any]) -> Row:
    return {
        "study": asked.study,
        "number": asked.trial,
        "config": config_to_json(config),
        "node": asked.node,
        "group": asked.group,
        "parent": None if asked.parent is None else list(asked.parent),
        "state": "running",
        "target": asked.target,
        "reached": 0,
        "value": None,
        "error": None,
        "objectives": None,
        "violation": None,
        "replicas": list(asked.replicas) or None,
        "horizon": asked.horizon,
    }


def _changes(record: TrialMove) -> Row:
    if isinstance(record, TrialAsked):
        # A trial that goes on beyond the length for which it was made ends on another node.
        return {
            "state": "running",
            "target": record.target,
            "node": record.node,
            "replicas": list(record.replicas) or None,
        }
    if isinstance(record, TrialStopped):
        return {"state": "stopped"}
    if isinstance(record, TrialReported):
        return {
            "state": "waiting",
            "reached": record.epoch,
            "value": record.value,
            "objectives": None if record.objectives is None else dict(record.objectives),
            "violation": record.violation,
        }
    error = [plain_text(text, lines=True) for text in (record.message, record.traceback)]
    return {"state": "failed", "error": [record.kind, *error]}


def _log_entry(record: TrialMove | TrialEnqueued, at: float) -> Row:
    entry: Row = {"study": record.study, "epoch": 0, "value": None, "at": at, "config": None}
    if isinstance(record, TrialEnqueued):
        config = config_to_json(record.config)
        return {**entry, "kind": "enqueued", "trial": record.place, "config": config}
    entry["trial"] = record.trial
    if isinstance(record, TrialAsked):
        return {**entry, "kind": "asked", "epoch": record.target}
    if isinstance(record, TrialReported):
        return {**entry, "kind": "reported", "epoch": record.epoch, "value": record.value}
    if isinstance(record, TrialFailed):
        return {**entry, "kind": "failed", "epoch": record.epoch}
    return {**entry, "kind": "stopped"}
