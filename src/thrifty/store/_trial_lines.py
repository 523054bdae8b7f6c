"""What user code has logged in each epoch: the last lines, in a table of their own.

They are the only records that may be lost: if they cannot be written, training goes on without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, and_, bindparam, delete, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from thrifty.core import LogLine, StoreError, error_text, plain_logger
from thrifty.core._trial_log import left_out, line_from_json

from . import _schema as schema
from ._engine import consistent_read, user_errors
from ._epoch_times import path_to
from ._records import LinesLogged, StudyInfo
from ._writer import keep_last


logger = plain_logger(__name__)

LOG_BYTES = 65_536
"""The default of ``Storage.log_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLine:
    """A line that was logged while a trial trained.

    Attributes:
        epoch: The epoch in which it was logged, from 1. A trial that failed has lines of an epoch
            that has not ended.
        line: The line.
    """

    epoch: int
    line: LogLine


class LogLines:
    """The log lines of the trials of a store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def of(self, study: StudyInfo, trial: int) -> Sequence[TrialLine]:
        """Return the lines of a trial in order; none if there is no such trial.

        A line of an epoch that trials share is one of each of them. With several seeds, the lines
        are those of the first.
        """
        t, n = schema.trials, schema.nodes
        with consistent_read(self._engine) as connection:
            row = connection.execute(
                select(t.c.node, t.c.state, t.c.target, t.c.reached).where(
                    t.c.study == study.id, t.c.number == trial
                )
            ).first()
            if row is None:
                return []
            nodes = select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == study.plan)
            origins = {each.node: (each.parent, each.start) for each in connection.execute(nodes)}
            end = last_epoch(row.state, target=row.target, reached=row.reached)
            path = path_to(row.node, end, origins=origins)
            return lines_along(connection, study.plan, path, origins=origins)

    def write(self, records: Sequence[LinesLogged]) -> bool:
        """Write lines, and keep the last of each node; return False if that fails."""
        try:
            with user_errors(self._engine), self._engine.begin() as connection:
                write_lines(connection, records)
        except (StoreError, SQLAlchemyError) as error:
            logger.warning(
                "what trials have logged cannot be written, and is lost; training goes on (%s)",
                error_text(error),
            )
            return False
        return True


def last_epoch(state: str, *, target: int, reached: int) -> int:
    """Return the last epoch of which a trial may have lines.

    >>> last_epoch("failed", target=9, reached=3), last_epoch("waiting", target=3, reached=3)
    (9, 3)
    """
    return target if state in ("running", "failed") else reached


def lines_along(
    connection: Connection,
    plan: int,
    path: Iterable[tuple[int, int]],
    *,
    origins: Mapping[int, tuple[int | None, int]],
) -> list[TrialLine]:
    """Return the lines along a path of nodes, each given with its last epoch."""
    table = schema.log_lines
    spans = [
        and_(table.c.node == node, table.c.epoch > origins[node][1], table.c.epoch <= last)
        for node, last in path
    ]
    if not spans:
        return []
    query = (
        select(table.c.epoch, table.c.lines)
        .where(table.c.plan == plan, or_(*spans))
        .order_by(table.c.epoch)
    )
    return [
        TrialLine(epoch=epoch, line=line_from_json(each))
        for epoch, text in connection.execute(query)
        for each in json.loads(text)
    ]


def write_lines(connection: Connection, records: Sequence[LinesLogged]) -> None:
    """Write lines, and remove the oldest epochs of nodes that have too many bytes."""
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    most: dict[tuple[int, int], int] = {}
    for each in records:
        text = _within(each.lines, max_bytes=each.max_bytes)
        rows[each.plan, each.node, each.epoch] = {
            "plan": each.plan,
            "node": each.node,
            "epoch": each.epoch,
            "num_bytes": len(text),
            "lines": text,
        }
        most[each.plan, each.node] = each.max_bytes
    keep_last(connection, schema.log_lines, list(rows.values()))
    for (plan, node), max_bytes in most.items():
        _keep_latest(connection, plan, node, max_bytes=max_bytes)


def _within(lines: Sequence[LogLine], *, max_bytes: int) -> str:
    """Return the last lines as JSON, as many as fit; at least one."""
    texts = [json.dumps(each.to_json()) for each in lines]
    first, total = len(texts), 2
    while first and (first == len(texts) or total + len(texts[first - 1]) + 2 <= max_bytes):
        first -= 1
        total += len(texts[first]) + 2
    if first:
        texts.insert(first, json.dumps(left_out(first, before=lines[first]).to_json()))
    return f"[{', '.join(texts[first:])}]"


def _keep_latest(connection: Connection, plan: int, node: int, *, max_bytes: int) -> None:
    table = schema.log_lines
    mine = (table.c.plan == plan, table.c.node == node)
    total = connection.execute(select(func.sum(table.c.num_bytes)).where(*mine)).scalar() or 0
    if total <= max_bytes:
        return
    kept = 0
    query = select(table.c.epoch, table.c.num_bytes).where(*mine).order_by(table.c.epoch.desc())
    for epoch, num_bytes in connection.execute(query).all():
        kept += num_bytes
        if kept > max_bytes and kept > num_bytes:  # the last epoch stays in any case
            connection.execute(delete(table).where(*mine, table.c.epoch <= epoch))
            return


def forget_lines(connection: Connection, plan: int, *, last: Mapping[int, float]) -> None:
    """Remove the lines of epochs that are on no way to a trial.

    Args:
        connection: The database.
        plan: The plan.
        last: The last epoch of each node that is needed.
    """
    table = schema.log_lines
    query = select(table.c.node, table.c.epoch).where(table.c.plan == plan)
    gone = [
        {"n": node, "e": epoch}
        for node, epoch in connection.execute(query)
        if epoch > last.get(node, -1)
    ]
    if gone:
        statement = delete(table).where(
            table.c.plan == plan, table.c.node == bindparam("n"), table.c.epoch == bindparam("e")
        )
        connection.execute(statement, gone)
