"""Removing what no study needs any more: old deleted studies, and the states of their trials.

Records of epochs stay: they are small, and tell later studies what is known. A state stays if it
lies on the way to a trial of a study of the database, or of a deleted one that can be restored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sqlalchemy import Connection, Engine, bindparam, delete, select

from thrifty.core import Clock

from . import _schema as schema
from ._checkpoints import CheckpointFolder, remove_leftovers
from ._engine import consistent_read, fetch, user_errors
from ._records import nodes_of_replicas
from ._trash import Deleted, Trash, ends_in_trash
from .coordination._claims import lock_plan, next_revision
from .coordination._leases import is_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What was removed, or would be.

    Attributes:
        studies: Deleted studies that can no longer be restored.
        num_states: States of trials that no study needs.
        num_bytes: Bytes of all files that are removed, also of those that killed runs have left.
        num_elsewhere: States that no study needs and whose files are not in this folder.
        num_busy: Plans that were left alone, because a process trains them.
    """

    studies: tuple[Deleted, ...] = ()
    num_states: int = 0
    num_bytes: int = 0
    num_elsewhere: int = 0
    num_busy: int = 0


_State = tuple[int, int, str, int]
"""Node, epoch, path and bytes of a state."""


def collect(
    engine: Engine,
    checkpoints: CheckpointFolder,
    clock: Clock,
    *,
    older_than_s: float,
    dry_run: bool,
) -> Garbage:
    """Remove what no study needs any more, in all plans that no process trains.

    Args:
        engine: The database.
        checkpoints: Its checkpoint folder.
        clock: Tells how long ago a study was deleted.
        older_than_s: Seconds since a study was deleted, after which it cannot be restored.
        dry_run: Whether to remove nothing.
    """
    trash = Trash(engine, clock)
    old = tuple(s for s in trash.list() if clock.now() - s.at >= older_than_s)
    if not dry_run:
        trash.remove(old)
    gone = Garbage(studies=old)
    plans = fetch(engine, select(schema.plans.c.id, schema.plans.c.identity))
    for plan, folder in plans:
        here = {file.name for file in checkpoints.files(folder)}
        if dry_run:
            with consistent_read(engine) as connection:
                found = _unneeded(connection, plan, but=[study.id for study in old])
                busy = is_held(connection, plan, clock=clock)
        else:
            found, busy = _forgotten(engine, plan, clock, here=here)
        mine = [state for state in found if state[2].rpartition("/")[2] in here]
        gone = replace(
            gone,
            num_states=gone.num_states + len(mine),
            num_elsewhere=gone.num_elsewhere + len(found) - len(mine),
            num_busy=gone.num_busy + busy,
            num_bytes=gone.num_bytes + (sum(state[3] for state in mine) if dry_run else 0),
        )
        if not dry_run and not busy and here:
            gone = replace(
                gone,
                num_bytes=gone.num_bytes
                + _swept(engine, checkpoints, clock, plan=plan, folder=folder),
            )
    return gone


def _forgotten(
    engine: Engine, plan: int, clock: Clock, *, here: Iterable[str]
) -> tuple[list[_State], bool]:
    """Delete the records of unused states; return these, and whether a process runs."""
    names = set(here)
    with user_errors(engine), engine.begin() as connection:
        lock_plan(connection, plan)
        if is_held(connection, plan, clock=clock):
            return [], True
        found = _unneeded(connection, plan)
        mine = [
            {"n": node, "e": epoch}
            for node, epoch, path, _ in found
            if path.rpartition("/")[2] in names
        ]
        if mine:
            next_revision(connection, plan)
            t = schema.checkpoints
            statement = delete(t).where(
                t.c.plan == plan, t.c.node == bindparam("n"), t.c.epoch == bindparam("e")
            )
            connection.execute(statement, mine)
    return found, False


def _swept(
    engine: Engine, checkpoints: CheckpointFolder, clock: Clock, *, plan: int, folder: str
) -> int:
    """Delete the files of a plan that no record names; return their bytes."""
    with user_errors(engine), engine.begin() as connection:
        lock_plan(connection, plan)  # no run can begin to write files meanwhile
        if is_held(connection, plan, clock=clock):
            return 0
        left = remove_leftovers(
            engine, checkpoints, plan=plan, is_alone=lambda: True, folder=folder, now=clock.now()
        )
    return left.removed_bytes


def _unneeded(connection: Connection, plan: int, *, but: Iterable[int] = ()) -> list[_State]:
    """Return the states of a plan on no way to a trial.

    ``but`` are deleted studies whose trials do not count.
    """
    n, t, s, c = schema.nodes, schema.trials, schema.studies, schema.checkpoints
    origins = {
        row.node: (row.parent, row.start)
        for row in connection.execute(
            select(n.c.node, n.c.parent, n.c.start).where(n.c.plan == plan)
        )
    }
    of_trials = select(t.c.node, t.c.replicas).join(s, s.c.id == t.c.study).where(s.c.plan == plan)
    nodes = {
        node
        for first, others in connection.execute(of_trials)
        for node in (first, *nodes_of_replicas(others))
    }
    nodes |= {node for node, _ in ends_in_trash(connection, plan, but=but)}
    last = _last_needed(nodes, origins)
    kept = select(c.c.node, c.c.epoch, c.c.path, c.c.num_bytes).where(c.c.plan == plan)
    return [
        (node, epoch, path, num_bytes)
        for node, epoch, path, num_bytes in connection.execute(kept)
        if epoch > last.get(node, -1)
    ]


def _last_needed(
    nodes: Iterable[int], origins: Mapping[int, tuple[int | None, int]]
) -> dict[int, float]:
    """Return the last epoch of each node that is on the way to one of some nodes.

    A trial's own node is needed as a whole, since the trial may go on.

    >>> _last_needed([2], {0: (None, 0), 1: (0, 4), 2: (0, 6), 3: (2, 9)})
    {2: inf, 0: 6}
    """
    last: dict[int, float] = {}
    for node in nodes:
        at: int | None = node
        needed: float = math.inf
        while at is not None and at in origins and last.get(at, -1) < needed:
            last[at] = needed
            at, needed = origins[at]
    return last
