"""The plans of a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import ColumnElement, Connection, Engine, insert, select, update
from sqlalchemy.exc import IntegrityError

from thrifty.core import CheckpointRef, Clock
from thrifty.space import config_from_json

from . import _schema as schema
from ._engine import user_errors
from ._records import CheckpointAdded, EpochRecord, NodeRecord, PlanInfo, PlanRecords
from ._writer import write


class Plans:
    """Search plans by the identity of what they train."""

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
        """Return the plan of an identity; make it if there is none.

        Args:
            identity: what is trained, and how it is evaluated.
            task: the name of the task, for people.
            family: what is trained; equal for plans that differ only in their metrics.
            content: the records that a new plan begins with, of whichever plan.
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
                pass  # another process was quicker: it is there now
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
        with user_errors(self._engine), self._engine.connect() as connection:
            return [PlanInfo(**row._asdict()) for row in connection.execute(query)]

    def threads(self, plan: int) -> int | None:
        """The CPU threads of each worker that a plan is trained with; None: no run has fixed them yet."""
        query = select(schema.plans.c.threads).where(schema.plans.c.id == plan)
        with user_errors(self._engine), self._engine.connect() as connection:
            threads: int | None = connection.execute(query).scalar_one()
            return threads

    def fix_threads(self, plan: int, threads: int) -> int:
        """Fix the CPU threads of a plan's workers unless they are fixed already; returns what they are."""
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
        """Return the structures of a plan that are not fused: the reason, by the structure's key."""
        table = schema.refusals
        query = select(table.c.key, table.c.reason).where(table.c.plan == plan)
        with user_errors(self._engine), self._engine.connect() as connection:
            return {row.key: row.reason for row in connection.execute(query)}

    def load(self, plan: int) -> PlanRecords:
        """All that is known of a plan."""
        with user_errors(self._engine), self._engine.connect() as connection:
            return news_of(connection, plan)

    def standing(self, plan: int, *, but: int) -> list[tuple[int, int]]:
        """Where trials of other studies stand, ``(node, epoch)``, that may be asked to go on.

        Args:
            plan: of the studies.
            but: a study that does not count.
        """
        trials, studies = schema.trials, schema.studies
        query = (
            select(trials.c.node, trials.c.reached)
            .join(studies, studies.c.id == trials.c.study)
            .where(
                studies.c.plan == plan,
                studies.c.id != but,
                studies.c.state != "done",
                trials.c.state.in_(("running", "waiting")),
            )
        )
        with user_errors(self._engine), self._engine.connect() as connection:
            return [(node, epoch) for node, epoch in connection.execute(query)]

    def ends(self, plan: int, *, but: int) -> set[tuple[int, int]]:
        """Where trials of other studies are, ``(node, epoch)``, whatever became of them.

        Args:
            plan: Plan of the studies.
            but: Study that does not count.
        """
        trials, studies = schema.trials, schema.studies
        query = (
            select(trials.c.node, trials.c.reached)
            .join(studies, studies.c.id == trials.c.study)
            .where(studies.c.plan == plan, studies.c.id != but, trials.c.reached > 0)
            .distinct()
        )
        with user_errors(self._engine), self._engine.connect() as connection:
            return {(node, epoch) for node, epoch in connection.execute(query)}


def news_of(
    connection: Connection, plan: int, *, since: int = -1, num_known: int = 0
) -> PlanRecords:
    """What was written about a plan after a revision, and its nodes but those that are known.

    Rows written while it reads may be there or not: they are above the revision that it gives, and will be read again.
    """
    # first the revision, last the nodes: so nothing up to it is missing, and no row is of an unknown node
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
        nodes=[
            NodeRecord(
                plan=plan,
                node=row.node,
                parent=row.parent,
                start=row.start,
                config=config_from_json(row.config),
                epochs=row.epochs,
            )
            for row in nodes
        ],
        epochs=[
            EpochRecord(
                plan=plan,
                node=row.node,
                epoch=row.epoch,
                metrics=json.loads(row.metrics),
                seconds=row.seconds,
                worker=row.worker,
                seconds_checks=row.seconds_checks,
                seconds_alone=row.seconds_alone,
                seconds_alone_low=row.seconds_alone_low,
                seconds_alone_high=row.seconds_alone_high,
                study=row.study,
                evaluated=bool(row.evaluated),
                again=row.again,
                again_s=row.again_s,
                again_checks_s=row.again_checks_s,
                again_alone_s=row.again_alone_s,
                again_alone_low_s=row.again_alone_low_s,
                again_alone_high_s=row.again_alone_high_s,
            )
            for row in epochs
        ],
        checkpoints=[
            CheckpointRef(
                node=row.node,
                epoch=row.epoch,
                path=row.path,
                num_bytes=row.num_bytes,
                digest=row.digest,
                train_loss=row.train_loss,
            )
            for row in kept
        ],
    )
