"""Locks that let one transaction at a time write to a plan, and the plan's revisions."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from . import _schema as schema


_OURS = int.from_bytes(b"plan", "big")
"""Key that separates our advisory locks from those of other programs in the same database."""


def await_turn(connection: Connection, plan: int) -> None:
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
