"""Deleted studies: kept for a while in one value each, restored, or removed for good.

No other query finds a deleted study, because none of its rows is left in the other tables. What it
has trained stays in its plan, as records of epochs and as states, until garbage is collected: old
deleted studies, and the states that no study needs any more.

Records of epochs stay: they are small, and tell later studies what is known. A state, or an
artifact, stays if it lies on the way to a trial of a study of the database, or of a deleted one
that can be restored.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Table, bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from thrifty.core import (
    Clock,
    StoreBusyError,
    StudyMismatchError,
    StudyNotFoundError,
    UsageError,
    plain_text,
)

from . import _schema as schema
from ._checkpoints import (
    ARTIFACT_NAME,
    CheckpointFolder,
    FoundFile,
    is_own_folder,
    remove_leftovers,
)
from ._coordination import check_exists, held_studies, is_held, lock_plan, next_revision
from ._engine import consistent_read, fetch, user_errors
from ._records import StudyInfo, artifacts_of, nodes_of_replicas, records_of
from ._trial_lines import forget_lines


KEPT_S = 30 * 86_400.0
"""How long ``thrifty gc`` keeps a deleted study, in seconds, unless it is told otherwise."""

_FORMAT = 1
"""Version of the value that holds the rows of a study."""
_OWN = (schema.trials, schema.priors, schema.log, schema.acts)
"""The tables with rows of one study only."""
_NUMBERED = (schema.log, schema.acts)
"""Tables whose ids the database counts; restored rows get new ids, in the order of the old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A deleted study that can be restored.

    Attributes:
        id: Its number among the deleted studies of the database.
        name: Its name.
        plan: Its plan.
        num_trials: How many trials it has.
        who: The user and the machine that deleted it.
        at: When, in seconds since the epoch of Unix.
    """

    id: int
    name: str
    plan: int
    num_trials: int
    who: str
    at: float


class Trash:
    """The deleted studies of a store."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def put(self, study: StudyInfo, *, who: str) -> Deleted:
        """Delete a study, so that it can be restored. What it trained stays in its plan.

        Raises:
            StudyNotFoundError: Another process has deleted it.
            StoreBusyError: A process runs it.
            StoreWriteError: The disk is full, or the place is read-only.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            lock_plan(connection, study.plan)  # no process can take a lease before the commit
            check_exists(connection, study)
            if study.id in held_studies(connection, clock=self._clock):
                raise StoreBusyError(
                    f"study {study.name!r} cannot be deleted while a process runs it; stop that "
                    "process first (Ctrl-C)"
                )
            rows = _rows(connection, study.id)
            trials = rows["trials"]
            row: dict[str, Any] = {
                "name": study.name,
                "plan": study.plan,
                "num_trials": len(trials),
                "who": plain_text(who),
                "at": self._clock.now(),
            }
            kept = {"nodes": sorted(_ends(trials)), "rows": _packed(rows)}
            made = connection.execute(insert(schema.trash).values(**row, **kept))
            for table in (*_OWN, schema.leases):
                connection.execute(delete(table).where(table.c.study == study.id))
            # The next study may get this study's id, so clear the references to it.
            trained = update(schema.epochs).where(schema.epochs.c.study == study.id)
            connection.execute(trained.values(study=None))
            connection.execute(delete(schema.studies).where(schema.studies.c.id == study.id))
        assert made.inserted_primary_key is not None
        return Deleted(id=made.inserted_primary_key[0], **row)

    def list(self) -> Sequence[Deleted]:
        """Return all deleted studies that can be restored, in the order of their deletion."""
        return records_of(Deleted, fetch(self._engine, _infos().order_by(schema.trash.c.id)))

    def find(self, name: str) -> Deleted:
        """Return the study of this name that was deleted last.

        Raises:
            StudyNotFoundError: No study of this name can be restored.
        """
        found = [each for each in self.list() if each.name == name]
        if found:
            return found[-1]
        names = ", ".join(plain_text(each.name) for each in self.list()) or "none"
        raise StudyNotFoundError(
            f"no deleted study is called {plain_text(name)!r}; those that can be restored: {names}"
        )

    def restore(self, study: Deleted, *, name: str | None = None) -> str:
        """Make a deleted study what it was, and return its name.

        Args:
            study: The deleted study.
            name: Another name for it.

        Raises:
            StudyNotFoundError: Another process has restored or removed it.
            StudyMismatchError: There is a study of this name.
            UsageError: A newer thrifty deleted it.
            StoreWriteError: The disk is full, or the place is read-only.
        """
        name = study.name if name is None else name
        try:
            with user_errors(self._engine), self._engine.begin() as connection:
                lock_plan(connection, study.plan)
                mine = schema.trash.c.id == study.id
                packed = connection.execute(select(schema.trash.c.rows).where(mine)).scalar()
                if packed is None:
                    raise StudyNotFoundError(
                        f"the deleted study {plain_text(study.name)!r} is gone: another process "
                        "has restored or removed it"
                    )
                _write_back(connection, _unpacked(packed), name=name)
                connection.execute(delete(schema.trash).where(mine))
        except IntegrityError as error:
            raise StudyMismatchError(
                f"there is a study {plain_text(name)!r} already; restore the deleted one under "
                "another name (`thrifty restore NAME --as NEW`, `Study.restore(name=...)`)"
            ) from error
        return name

    def remove(self, studies: Iterable[Deleted]) -> None:
        """Remove deleted studies for good."""
        ids = [each.id for each in studies]
        with user_errors(self._engine), self._engine.begin() as connection:
            connection.execute(delete(schema.trash).where(schema.trash.c.id.in_(ids)))


def ends_in_trash(
    connection: Connection, plan: int, *, but: Iterable[int] = ()
) -> set[tuple[int, int]]:
    """Return ``(node, epoch)`` of all trials of a plan's deleted studies, without some of these."""
    t = schema.trash
    query = select(t.c.nodes).where(t.c.plan == plan, t.c.id.not_in(list(but)))
    return {(n, epoch) for ends in connection.execute(query).scalars() for n, epoch in ends}


def _infos() -> Any:
    t = schema.trash
    return select(t.c.id, t.c.name, t.c.plan, t.c.num_trials, t.c.who, t.c.at)


def _rows(connection: Connection, study: int) -> dict[str, Any]:
    """Return all rows of a study, by table."""
    found: dict[str, Any] = {
        table.name: [
            dict(row._mapping)
            for row in connection.execute(
                select(table).where(table.c.study == study).order_by(*table.primary_key)
            )
        ]
        for table in _OWN
    }
    of_study = select(schema.studies).where(schema.studies.c.id == study)
    found["study"] = dict(connection.execute(of_study).one()._mapping)
    e = schema.epochs
    trained = select(e.c.node, e.c.epoch).where(e.c.study == study)
    found["epochs"] = [list(row) for row in connection.execute(trained)]
    return found


def _ends(trials: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
    return {
        (node, trial["reached"])
        for trial in trials
        for node in (trial["node"], *nodes_of_replicas(trial["replicas"]))
    }


def _packed(rows: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps({"format": _FORMAT, **rows}).encode())


def _unpacked(packed: bytes) -> dict[str, Any]:
    """Return the rows of a deleted study.

    Raises:
        UsageError: A newer thrifty wrote them, or they are damaged.
    """
    try:
        found: dict[str, Any] = json.loads(zlib.decompress(packed))
    except (zlib.error, ValueError) as error:
        raise UsageError(
            f"the rows of the deleted study cannot be read ({error}); restore the database from a "
            "backup"
        ) from None
    if found.get("format") != _FORMAT:
        raise UsageError(
            f"the study was deleted by another version of thrifty (format {found.get('format')!r}, "
            f"and this one reads {_FORMAT}); restore it with that version"
        )
    return found


def _write_back(connection: Connection, rows: Mapping[str, Any], *, name: str) -> None:
    """Insert the rows of a deleted study; its id may be another one now."""
    row = {key: value for key, value in rows["study"].items() if key != "id"} | {"name": name}
    made = connection.execute(insert(schema.studies).values(**row)).inserted_primary_key
    assert made is not None
    for table in _OWN:
        fresh = [_renumbered(each, table, study=made[0]) for each in rows[table.name]]
        if fresh:
            connection.execute(insert(table), fresh)
    e = schema.epochs
    trained = [{"n": node, "e": epoch} for node, epoch in rows["epochs"]]
    if trained:
        statement = (
            update(e)
            .where(
                e.c.plan == row["plan"],
                e.c.node == bindparam("n"),
                e.c.epoch == bindparam("e"),
                e.c.study.is_(None),
            )
            .values(study=made[0])
        )
        connection.execute(statement, trained)


def _renumbered(row: Mapping[str, Any], table: Table, *, study: int) -> dict[str, Any]:
    own = {key: value for key, value in row.items() if key != "id" or table not in _NUMBERED}
    return own | {"study": study}


# -- what no study needs -----------------------------------------------------------------


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

    def plus(self, more: Garbage) -> Garbage:
        """Return this together with what was removed of another plan."""
        return Garbage(
            studies=self.studies + more.studies,
            num_states=self.num_states + more.num_states,
            num_bytes=self.num_bytes + more.num_bytes,
            num_elsewhere=self.num_elsewhere + more.num_elsewhere,
            num_busy=self.num_busy + more.num_busy,
        )


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
        files = checkpoints.files(folder)
        if dry_run:
            of_plan = _unneeded_of(engine, plan, clock, files=files, but=[s.id for s in old])
        else:
            of_plan = _remove_unneeded(
                engine, checkpoints, clock, plan=plan, folder=folder, files=files
            )
        gone = gone.plus(of_plan)
    return gone


def _unneeded_of(
    engine: Engine, plan: int, clock: Clock, *, files: Sequence[FoundFile], but: Sequence[int]
) -> Garbage:
    """Return what would be removed of a plan.

    Args:
        engine: The database.
        plan: The plan.
        clock: Tells whether a process trains the plan.
        files: The files in its folder.
        but: Studies that count as removed.
    """
    unnamed = 0
    with consistent_read(engine) as connection:
        found = _unneeded(connection, plan, but=but)
        busy = is_held(connection, plan, clock=clock)
        if not busy and is_own_folder(engine, plan, files):
            names = _needed_artifacts(connection, plan, but=but)
            unnamed = sum(
                file.num_bytes
                for file in files
                if ARTIFACT_NAME.fullmatch(file.name) and file.name not in names
            )
    mine = _states_here(found, files)
    return Garbage(
        num_states=len(mine),
        num_elsewhere=len(found) - len(mine),
        num_busy=int(busy),
        num_bytes=sum(state[3] for state in mine) + unnamed,
    )


def _remove_unneeded(
    engine: Engine,
    checkpoints: CheckpointFolder,
    clock: Clock,
    *,
    plan: int,
    folder: str,
    files: Sequence[FoundFile],
) -> Garbage:
    """Remove what no study needs of a plan, unless a process trains it; return what it was.

    Args:
        engine: The database.
        checkpoints: Its checkpoint folder.
        clock: Tells whether a process trains the plan.
        plan: The plan.
        folder: Its folder.
        files: The files in its folder.
    """
    found, busy = _forgotten(engine, plan, clock, here={file.name for file in files})
    num_bytes = 0
    if files and not busy:
        num_bytes = _swept(engine, checkpoints, clock, plan=plan, folder=folder)
    mine = _states_here(found, files)
    return Garbage(
        num_states=len(mine),
        num_elsewhere=len(found) - len(mine),
        num_busy=int(busy),
        num_bytes=num_bytes,
    )


def _states_here(states: Sequence[_State], files: Sequence[FoundFile]) -> list[_State]:
    """Return the states whose files are in the plan's folder."""
    here = {file.name for file in files}
    return [state for state in states if state[2].rpartition("/")[2] in here]


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
        forgotten = _forget_artifacts(connection, plan)
        forget_lines(connection, plan, last=_needed(connection, plan))
        if mine or forgotten:
            next_revision(connection, plan)
        if mine:
            t = schema.checkpoints
            statement = delete(t).where(
                t.c.plan == plan, t.c.node == bindparam("n"), t.c.epoch == bindparam("e")
            )
            connection.execute(statement, mine)
    return found, False


def _forget_artifacts(connection: Connection, plan: int) -> bool:
    """Remove artifacts from the records of epochs that no study needs; say whether there were any.

    Their files are then named by no record, and go with the other leftovers.
    """
    e = schema.epochs
    query = select(e.c.node, e.c.epoch).where(e.c.plan == plan, e.c.artifacts.is_not(None))
    logged = connection.execute(query).all()
    last = _needed(connection, plan) if logged else {}
    gone = [{"n": node, "e": epoch} for node, epoch in logged if epoch > last.get(node, -1)]
    if gone:
        statement = update(e).where(
            e.c.plan == plan, e.c.node == bindparam("n"), e.c.epoch == bindparam("e")
        )
        connection.execute(statement.values(artifacts=None), gone)
    return bool(gone)


def _needed_artifacts(connection: Connection, plan: int, *, but: Iterable[int]) -> set[str]:
    """Return the names of the files of artifacts that stay; ``but`` as in ``_unneeded``."""
    e = schema.epochs
    query = select(e.c.node, e.c.epoch, e.c.artifacts).where(
        e.c.plan == plan, e.c.artifacts.is_not(None)
    )
    last = _needed(connection, plan, but=but)
    return {
        f"artifact-{each.digest}"
        for node, epoch, stored in connection.execute(query)
        if epoch <= last.get(node, -1)
        for each in artifacts_of(stored)
    }


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
    c = schema.checkpoints
    last = _needed(connection, plan, but=but)
    kept = select(c.c.node, c.c.epoch, c.c.path, c.c.num_bytes).where(c.c.plan == plan)
    return [
        (node, epoch, path, num_bytes)
        for node, epoch, path, num_bytes in connection.execute(kept)
        if epoch > last.get(node, -1)
    ]


def _needed(connection: Connection, plan: int, *, but: Iterable[int] = ()) -> dict[int, float]:
    """Return the last epoch of each node of a plan that is on the way to a trial."""
    n, t, s = schema.nodes, schema.trials, schema.studies
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
    return _last_needed(nodes, origins)


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
