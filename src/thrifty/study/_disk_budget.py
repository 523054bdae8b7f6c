"""The disk budget of a run: which checkpoints to delete, and a warning if the rest is too big."""

from __future__ import annotations

import math

from thrifty.core import StoreUnreachableError, plain_logger
from thrifty.plan import evictable_checkpoints
from thrifty.store import CheckpointRemoved, Driver, Store

from ._ledger import Ledger
from ._results import best_ones


logger = plain_logger(__name__)


class DiskBudget:
    """A limit on the bytes of checkpoints; deletes checkpoints that exceed it.

    Args:
        budget_bytes: How many bytes the checkpoints of the plan may take.
        other_bytes: How many bytes other files in their folder take, which cannot be removed.
    """

    def __init__(self, budget_bytes: float, *, other_bytes: int = 0) -> None:
        self._bytes = budget_bytes
        self._other_bytes = other_bytes
        self._tried_at = math.nan
        """Bytes of checkpoints left when the last attempt could not get below the budget."""
        self._warned = False

    def hold(self, ledger: Ledger, *, driver: Driver, store: Store, done: bool = False) -> None:
        """Delete checkpoints if they exceed the budget.

        Args:
            ledger: The ledger of the study.
            driver: Records the deletions.
            store: Holds the checkpoint files.
            done: Whether the algorithm has nothing more to ask, so that no trial goes on.
        """
        left = self._bytes - self._other_bytes
        if ledger.kept_bytes <= left or (ledger.kept_bytes == self._tried_at and not done):
            return
        live = [] if done else [*ledger.live()]
        live += [(ledger.node_of[trial.number], trial.reached) for trial in best_ones(ledger)]
        try:
            live += store.plans.standing(ledger.plan_id, but=ledger.study_id)
        except StoreUnreachableError:
            return  # try again later: without the server, other studies' needs are unknown
        refs = evictable_checkpoints(ledger.plan, live=live, budget_bytes=max(left, 0.0))
        # Delete the record first: a file without a record is harmless, the opposite is not.
        driver.record([
            CheckpointRemoved(plan=ledger.plan_id, node=r.node, epoch=r.epoch) for r in refs
        ])
        for ref in refs:
            ledger.plan.drop(ref)
            ledger.kept_bytes -= ref.num_bytes
            store.checkpoints.delete(ref)
        if ledger.kept_bytes > left:
            self._tried_at = ledger.kept_bytes
            self._warn(ledger)

    def _warn(self, ledger: Ledger) -> None:
        if self._warned:
            return
        self._warned = True
        other = (
            f", besides {self._other_bytes:,} bytes that killed runs have left"
            if self._other_bytes
            else ""
        )
        num = sum(1 for _ in ledger.plan.checkpoints())
        logger.warning(
            "disk_budget_bytes=%s cannot be held: %d checkpoints with %s bytes have to stay%s, "
            "because trials may "
            "go on from them or they are the best trials'; raise the budget, or try fewer trials "
            "at a time",
            f"{self._bytes:,.0f}",
            num,
            f"{ledger.kept_bytes:,}",
            other,
        )
