"""The plans of a store."""

from __future__ import annotations

import json

from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import IntegrityError

from thrifty.core import CheckpointRef, Clock
from thrifty.space import config_from_json

from . import _schema as schema
from ._engine import user_errors
from ._lease import Lease
from ._records import EpochRecord, NodeRecord, PlanInfo, PlanRecords


class Plans:
    """Search plans by the identity of what they train."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def open(self, identity: str, *, task: str) -> PlanInfo:
        """The plan of an identity, made if there is none."""
        found = self.find(identity)
        if found is not None:
            return found
        with user_errors(self._engine):
            try:
                with self._engine.begin() as connection:
                    row = {"identity": identity, "task": task, "created_at": self._clock.now()}
                    connection.execute(insert(schema.plans), row)
            except IntegrityError:
                pass  # another process was quicker: it is there now
        made = self.find(identity)
        assert made is not None
        return made

    def find(self, identity: str) -> PlanInfo | None:
        """The plan of an identity, if there is one."""
        query = select(schema.plans).where(schema.plans.c.identity == identity)
        with user_errors(self._engine), self._engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else PlanInfo(**row._asdict())

    def load(self, plan: int) -> PlanRecords:
        """All that is known of a plan."""
        with user_errors(self._engine), self._engine.connect() as connection:
            nodes = connection.execute(
                select(schema.nodes)
                .where(schema.nodes.c.plan == plan)
                .order_by(schema.nodes.c.node)
            ).all()
            epochs = connection.execute(
                select(schema.epochs)
                .where(schema.epochs.c.plan == plan)
                .order_by(schema.epochs.c.node, schema.epochs.c.epoch)
            ).all()
            kept = connection.execute(
                select(schema.checkpoints).where(schema.checkpoints.c.plan == plan)
            ).all()
        return PlanRecords(
            nodes=[
                NodeRecord(**{**row._asdict(), "config": config_from_json(row.config)})
                for row in nodes
            ],
            epochs=[
                EpochRecord(**{**row._asdict(), "metrics": json.loads(row.metrics)})
                for row in epochs
            ],
            checkpoints=[
                CheckpointRef(
                    node=row.node,
                    epoch=row.epoch,
                    path=row.path,
                    num_bytes=row.num_bytes,
                    digest=row.digest,
                )
                for row in kept
            ],
        )

    def acquire(self, plan: int, *, study: str) -> Lease:
        """Holds a plan for this process.

        Raises:
            StoreBusyError: another living process holds it.
        """
        with user_errors(self._engine):
            return Lease(self._engine, plan, study=study, clock=self._clock)
