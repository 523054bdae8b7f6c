"""Deleted studies: kept for a while in one value each, restored, or removed for good.

No other query finds a deleted study, because none of its rows is left in the other tables. What it
has trained stays in its plan, as records of epochs and as states. ``collect`` removes the states
that no study needs any more.
"""

from __future__ import annotations

import json
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
from ._engine import fetch, user_errors
from ._records import StudyInfo, nodes_of_replicas, records_of
from .coordination._claims import lock_plan
from .coordination._leases import check_exists, held_studies


KEPT_S = 30 * 86_400.0
"""How long ``thrifty gc`` keeps a deleted study, in seconds, unless it is told otherwise."""

_FORMAT = 1
"""Version of the value that holds the rows of a study."""
_OWN = (schema.trials, schema.priors, schema.log, schema.acts)
"""The tables with rows of one study only."""
_NUMBERED = (schema.log, schema.acts)
"""Those whose ids are numbers of the database; rows get new ones in the same order."""


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
                "another name"
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
        raise UsageError(f"what is kept of the deleted study is damaged ({error})") from None
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
