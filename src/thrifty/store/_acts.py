"""Acts of people on a study: requests, which the process that runs it applies once, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Connection, Engine, bindparam, insert, select, update

from thrifty.core import Clock, plain_text

from . import _schema as schema
from ._coordination import check_exists
from ._engine import fetch, user_errors
from ._records import ActApplied, StudyInfo, records_of


ActKind = Literal[
    "stop",
    "stop trial",
    "pause",
    "resume",
    "lengthen",
    "branch",
    "enqueue",
    "extend",
    "note",
    "tag",
    "untag",
]
"""``stop`` ends a run of a study cleanly. ``branch`` has enqueued a branch of a trial, ``enqueue``
a configuration; on the dashboard, that was made from the configuration of a trial.

``lengthen`` requests a larger ``max_epochs``, and ``extend`` records that it was raised.
"""
NEEDS_RUN: frozenset[ActKind] = frozenset({"stop", "stop trial", "pause", "resume", "lengthen"})
"""Requests, which a process that runs the study applies. Other acts are done when written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A request to a study.

    Attributes:
        id: Its number in the database; later acts have larger ones.
        study: The study.
        kind: What it requests, such as ``"stop"`` or ``"note"``.
        trial: Number of the trial that it is about; None: the whole study.
        text: The note, the tag, or the requested ``max_epochs`` in digits.
        who: The user and the machine.
        at: When, in seconds since the epoch of Unix.
        applied_at: When it was applied; None: it is queued.
        answer: The reason if it could not be done, else empty.
    """

    id: int
    study: int
    kind: ActKind
    trial: int | None
    text: str
    who: str
    at: float
    applied_at: float | None
    answer: str

    @property
    def is_queued(self) -> bool:
        """Whether it waits for a process that runs the study."""
        return self.applied_at is None

    @property
    def max_epochs(self) -> int | None:
        """The requested ``max_epochs``; None if the act requests no longer trials."""
        return int(self.text) if self.kind == "lengthen" else None


class Acts:
    """The acts on the studies of a store."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def add(
        self, study: StudyInfo, kind: ActKind, *, trial: int | None, text: str, who: str
    ) -> Act:
        """Write an act; a request is queued, anything else is done with that.

        Raises:
            StudyNotFoundError: Another process has deleted the study.
            StoreWriteError: The disk is full, or the place is read-only.
        """
        with user_errors(self._engine), self._engine.begin() as connection:
            check_exists(connection, study)
            return write_act(
                connection, study, kind, trial=trial, text=text, who=who, at=self._clock.now()
            )

    def of(self, study: int) -> Sequence[Act]:
        """Return all acts on a study, in order."""
        table = schema.acts
        query = select(table).where(table.c.study == study).order_by(table.c.id)
        return records_of(Act, fetch(self._engine, query))

    def answer(self, records: Sequence[ActApplied]) -> None:
        """Write why requests could not be done."""
        with user_errors(self._engine), self._engine.begin() as connection:
            write_applied(connection, records, at=self._clock.now())


def write_act(
    connection: Connection,
    study: StudyInfo,
    kind: ActKind,
    *,
    trial: int | None,
    text: str,
    who: str,
    at: float,
) -> Act:
    """Write an act in a transaction of the caller."""
    assert kind in get_args(ActKind), kind
    row: dict[str, Any] = {
        "study": study.id,
        "kind": kind,
        "trial": trial,
        "text": plain_text(text, lines=True),
        "who": plain_text(who),
        "at": at,
        "applied_at": None if kind in NEEDS_RUN else at,
        "answer": "",
    }
    made = connection.execute(insert(schema.acts).values(row)).inserted_primary_key
    assert made is not None
    return Act(id=made[0], **row)


def queued(connection: Connection, study: int) -> Sequence[Act]:
    """Return the acts that are not applied yet, in order."""
    table = schema.acts
    query = (
        select(table)
        .where(table.c.study == study, table.c.applied_at.is_(None))
        .order_by(table.c.id)
    )
    return records_of(Act, connection.execute(query).all())


def write_applied(connection: Connection, records: Sequence[ActApplied], *, at: float) -> None:
    """Write that acts were applied."""
    if records:
        table = schema.acts
        statement = (
            update(table)
            .where(table.c.id == bindparam("act"))
            .values(applied_at=at, answer=bindparam("said"))
        )
        rows = [{"act": each.act, "said": plain_text(each.answer)} for each in records]
        connection.execute(statement, rows)


def tags_of(acts: Sequence[Act]) -> dict[int | None, list[str]]:
    """Return the tags of each trial, and under None those of the study, as they are now.

    >>> from thrifty.store._acts import Act
    >>> def act(kind, text, trial=None):
    ...     return Act(
    ...         id=1,
    ...         study=1,
    ...         kind=kind,
    ...         trial=trial,
    ...         text=text,
    ...         who="",
    ...         at=0.0,
    ...         applied_at=0.0,
    ...         answer="",
    ...     )
    >>> tags_of([act("tag", "good"), act("tag", "odd", 3), act("untag", "good")])
    {3: ['odd']}
    """
    found: dict[int | None, list[str]] = {}
    for act in acts:
        mine = found.setdefault(act.trial, [])
        if act.kind == "tag" and act.text not in mine:
            mine.append(act.text)
        elif act.kind == "untag" and act.text in mine:
            mine.remove(act.text)
    return {trial: tags for trial, tags in found.items() if tags}
