"""Claims of stages by drivers, and turns on a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    Integer,
    String,
    Table,
    bindparam,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from thrifty.plan import Stage
from thrifty.store import _schema as schema
from thrifty.store._records import Claim


_OURS = int.from_bytes(b"plan", "big")
"""Key that separates our advisory locks from those of other programs in the same database."""


def lock_plan(connection: Connection, plan: int) -> None:
    """Lock a plan for this transaction; wait until no other transaction writes about it."""
    _queue(connection, plan)
    same = {"revision": schema.plans.c.revision}
    connection.execute(update(schema.plans).where(schema.plans.c.id == plan).values(same))


def next_revision(connection: Connection, plan: int) -> int:
    """Lock a plan for this transaction, increment its revision, and return the new revision."""
    _queue(connection, plan)
    counted = (
        update(schema.plans)
        .where(schema.plans.c.id == plan)
        .values(revision=schema.plans.c.revision + 1)
        .returning(schema.plans.c.revision)
    )
    return int(connection.execute(counted).scalar_one())


def _queue(connection: Connection, plan: int) -> None:
    """Wait for an advisory lock on PostgreSQL, because a commit wakes only one waiter of it.

    If transactions waited for the row instead, a commit would wake all of them, and all but one
    would have to wait again.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_OURS, plan)))


Spans = Mapping[int, tuple[int, int]]
"""First and last epoch by node."""


def spans_of(stages: Iterable[Stage]) -> dict[int, tuple[int, int]]:
    """Return the span of epochs that a chain of stages trains of each node.

    >>> spans_of([
    ...     Stage(node=0, start=0, stop=3),
    ...     Stage(node=0, start=3, stop=5),
    ...     Stage(node=2, start=5, stop=9),
    ... ])
    {0: (0, 5), 2: (5, 9)}
    """
    spans: dict[int, tuple[int, int]] = {}
    for stage in stages:
        spans[stage.node] = (spans.get(stage.node, (stage.start, 0))[0], stage.stop)
    return spans


def claim(connection: Connection, spans: Spans, *, plan: int, owner: str, seen: int) -> bool:
    """Claim all nodes for a driver; return whether that succeeded.

    It fails if another driver has claimed one of the nodes, or if something was written about one
    after revision ``seen``. The caller must then roll back the transaction.
    """
    # Lock rows in the order of their keys, so that two drivers never wait for each other.
    return all(
        _claim_one(connection, node, spans[node], plan=plan, owner=owner, seen=seen)
        for node in sorted(spans)
    )


def _claim_one(
    connection: Connection, node: int, span: tuple[int, int], *, plan: int, owner: str, seen: int
) -> bool:
    values = {"on": plan, "of": node, "first": span[0], "last": span[1], "by": owner, "seen": seen}
    return connection.execute(_TAKE[connection.dialect.name], values).first() is not None


def _take_by(insert: Callable[[Table], Any]) -> Executable:
    """Return the statement that claims a node; it is built once, because every stage runs it."""
    nodes, claims = schema.nodes, schema.claims
    fresh = (
        select(
            nodes.c.plan,
            nodes.c.node,
            bindparam("first", type_=Integer),
            bindparam("last", type_=Integer),
            bindparam("by", type_=String),
        )
        .where(
            nodes.c.plan == bindparam("on"),
            nodes.c.node == bindparam("of"),
            nodes.c.revision <= bindparam("seen"),
        )
        # Wait for drivers that are writing about this node, and then see what they wrote.
        .with_for_update(read=True)
    )
    statement = insert(claims).from_select(["plan", "node", "start", "stop", "owner"], fresh)
    mine: Executable = statement.on_conflict_do_update(
        index_elements=["plan", "node"],
        set_={"start": statement.excluded.start, "stop": statement.excluded.stop},
        where=claims.c.owner == bindparam("by"),
    ).returning(claims.c.node)
    return mine


_TAKE = {"sqlite": _take_by(sqlite.insert), "postgresql": _take_by(postgresql.insert)}


def release(connection: Connection, nodes: Collection[int], *, plan: int, owner: str) -> None:
    """Release a driver's claims on nodes."""
    claims = schema.claims
    connection.execute(
        delete(claims).where(
            claims.c.plan == plan, claims.c.owner == owner, claims.c.node.in_(nodes)
        )
    )


def claims_of_others(connection: Connection, *, plan: int, owner: str) -> tuple[Claim, ...]:
    """Return the claims of other drivers."""
    claims = schema.claims
    query = (
        select(claims.c.node, claims.c.start, claims.c.stop)
        .where(claims.c.plan == plan, claims.c.owner != owner)
        .order_by(claims.c.node)
    )
    return tuple(
        Claim(node=node, start=start, stop=stop) for node, start, stop in connection.execute(query)
    )
