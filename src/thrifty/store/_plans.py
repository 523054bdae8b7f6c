"""Access to the search plans of a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import ColumnElement, Connection, Engine, insert, select, update
from sqlalchemy.exc import IntegrityError

from thrifty.core import CheckpointRef, Clock
from thrifty.space import config_from_json

from . import _schema as schema
from ._engine import consistent_read, fetch, user_errors
from ._records import (
    CheckpointAdded,
    EpochRecord,
    NodeRecord,
    PlanInfo,
    PlanRecords,
    artifacts_of,
    attributes_of,
    nodes_of_replicas,
    records_of,
)
from ._trash import ends_in_trash
from ._writer import write


class Plans:
    """The search plans of a store; a plan's identity says what it trains and how it evaluates."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def open(
        self,
        identity: str,
        *,
        task: str,
        family: str | None = None,
        content: Sequence[NodeRecord | CheckpointAdded] = (),
    ) -> PlanInfo:
        """Return the plan of an identity; create it if there is none.

        Args:
            identity: Identifier of what is trained and how it is evaluated.
            task: The name of the task, for people.
            family: Identifier of what is trained; equal for plans that differ only in metrics.
            content: Records to put into a new plan; their own plan numbers are replaced.
        """
        found = self.find(identity)
        if found is not None:
            return found
        row = {
            "identity": identity,
            "family": family,
            "task": task,
            "created_at": self._clock.now(),
        }
        with user_errors(self._engine):
            try:
                with self._engine.begin() as connection:
                    key = connection.execute(insert(schema.plans), row).inserted_primary_key
                    assert key is not None
                    own = [replace(record, plan=key[0]) for record in content]
                    write(connection, own, at=self._clock.now())
            except IntegrityError:
                pass  # another process has just created the same plan
        made = self.find(identity)
        assert made is not None
        return made

    def find(self, identity: str) -> PlanInfo | None:
        """Return the plan of an identity, or None."""
        found = self._where(schema.plans.c.identity == identity)
        return found[0] if found else None

    def get(self, plan: int) -> PlanInfo:
        """Return a plan by its id."""
        return self._where(schema.plans.c.id == plan)[0]

    def relatives(self, family: str) -> list[PlanInfo]:
        """Return all plans of a family, the newest first."""
        return self._where(schema.plans.c.family == family)[::-1]

    def _where(self, condition: ColumnElement[bool]) -> list[PlanInfo]:
        t = schema.plans
        query = (
            select(t.c.id, t.c.identity, t.c.task, t.c.created_at, t.c.family)
            .where(condition)
            .order_by(t.c.id)
        )
        return [PlanInfo(**row._asdict()) for row in fetch(self._engine, query)]

    def threads(self, plan: int) -> int | None:
        """Return the CPU threads of each worker of a plan; None if no run has fixed them yet."""
        with user_errors(self._engine), self._engine.connect() as connection:
            return threads_of(connection, plan)

    def fix_threads(self, plan: int, threads: int) -> int:
        """Fix the CPU threads of a plan's workers unless a run has done so; return their number."""
        table = schema.plans
        statement = (
            update(table)
            .where(table.c.id == plan, table.c.threads.is_(None))
            .values(threads=threads)
        )
        with user_errors(self._engine), self._engine.begin() as connection:
            connection.execute(statement)
        fixed = self.threads(plan)
        assert fixed is not None
        return fixed

    def refusals(self, plan: int) -> dict[str, str]:
        """Return the reasons why structures of a plan must not be fused, by the structure's key."""
        table = schema.refusals
        query = select(table.c.key, table.c.reason).where(table.c.plan == plan)
        return {row.key: row.reason for row in fetch(self._engine, query)}

    def load(self, plan: int) -> PlanRecords:
        """Return all records of a plan, as they were at one moment."""
        with consistent_read(self._engine) as connection:
            return news_of(connection, plan)

    def standing(self, plan: int, *, but: int) -> list[tuple[int, int]]:
        """Return the positions ``(node, epoch)`` of other studies' trials that may continue.

        Args:
            plan: The plan of the studies.
            but: A study to leave out.
        """
        trials, studies = schema.trials, schema.studies
        query = (
            select(trials.c.node, trials.c.reached, trials.c.replicas)
            .join(studies, studies.c.id == trials.c.study)
            .where(
                studies.c.plan == plan,
                studies.c.id != but,
                studies.c.state != "done",
                trials.c.state.in_(("running", "waiting")),
            )
        )
        return [
            (node, epoch)
            for first, epoch, others in fetch(self._engine, query)
            for node in (first, *nodes_of_replicas(others))
        ]

    def ends(self, plan: int, *, but: int) -> set[tuple[int, int]]:
        """Return the positions ``(node, epoch)`` of all trials of other studies, in any state.

        Trials that have trained no epoch are left out. Deleted studies that can be restored count.

        Args:
            plan: The plan of the studies.
            but: A study to leave out.
        """
        trials, studies = schema.trials, schema.studies
        query = (
            select(trials.c.node, trials.c.reached, trials.c.replicas)
            .join(studies, studies.c.id == trials.c.study)
            .where(studies.c.plan == plan, studies.c.id != but, trials.c.reached > 0)
        )
        with user_errors(self._engine), self._engine.connect() as connection:
            found = {
                (node, epoch)
                for first, epoch, others in connection.execute(query)
                for node in (first, *nodes_of_replicas(others))
            }
            return found | {each for each in ends_in_trash(connection, plan) if each[1]}


def threads_of(connection: Connection, plan: int) -> int | None:
    """Return the CPU threads of each worker of a plan; None if no run has fixed them yet."""
    query = select(schema.plans.c.threads).where(schema.plans.c.id == plan)
    threads: int | None = connection.execute(query).scalar_one()
    return threads


def news_of(
    connection: Connection, plan: int, *, since: int = -1, num_known: int = 0
) -> PlanRecords:
    """Return the records of a plan after revision ``since``, and its nodes from ``num_known`` on.

    The result may contain some rows written while this function reads. Their revisions are above
    the returned one, so they are read again later.
    """
    # Read the revision first, so that nothing up to it is missing, and the nodes last, so that
    # every row's node is known.
    revision = connection.execute(
        select(schema.plans.c.revision).where(schema.plans.c.id == plan)
    ).scalar_one()
    epochs = connection.execute(
        select(schema.epochs)
        .where(schema.epochs.c.plan == plan, schema.epochs.c.revision > since)
        .order_by(schema.epochs.c.node, schema.epochs.c.epoch)
    ).all()
    kept = connection.execute(
        select(schema.checkpoints).where(
            schema.checkpoints.c.plan == plan, schema.checkpoints.c.revision > since
        )
    ).all()
    nodes = connection.execute(
        select(schema.nodes)
        .where(schema.nodes.c.plan == plan, schema.nodes.c.node >= num_known)
        .order_by(schema.nodes.c.node)
    ).all()
    return PlanRecords(
        revision=revision,
        nodes=records_of(NodeRecord, nodes, config=config_from_json),
        epochs=records_of(
            EpochRecord,
            epochs,
            metrics=json.loads,
            evaluated=bool,
            attributes=attributes_of,
            artifacts=artifacts_of,
        ),
        checkpoints=records_of(CheckpointRef, kept),
    )
