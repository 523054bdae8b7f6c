"""Turns: one writer of a plan at a time, and each of them a revision."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from . import _schema as schema


_OURS = int.from_bytes(b"plan", "big")
"""Tells our locks from those that another program takes in the same database."""


def await_turn(connection: Connection, plan: int) -> None:
    """Waits until nobody else writes about a plan; it is this transaction's turn until it ends."""
    _queue(connection, plan)
    same = {"revision": schema.plans.c.revision}
    connection.execute(update(schema.plans).where(schema.plans.c.id == plan).values(same))


def next_revision(connection: Connection, plan: int) -> int:
    """Counts a plan's revision up, when it is this transaction's turn."""
    _queue(connection, plan)
    counted = (
        update(schema.plans)
        .where(schema.plans.c.id == plan)
        .values(revision=schema.plans.c.revision + 1)
        .returning(schema.plans.c.revision)
    )
    return int(connection.execute(counted).scalar_one())


def _queue(connection: Connection, plan: int) -> None:
    """Each commit wakes one. All who wait for a row are woken by it, and all but one lie down again."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_OURS, plan)))
