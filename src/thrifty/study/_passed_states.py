"""Deletes superseded checkpoints while a study runs.

An algorithm that looks at every epoch makes a worker keep every epoch. Most of these states are
needed only until the next one exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from thrifty.core import CheckpointRef, Clock, StoreUnreachableError
from thrifty.plan import superseded
from thrifty.store import Store

from ._ledger import Ledger


LOOK_S = 5.0
"""Seconds between reads of other studies' trials if other processes train the plan."""


class PassedStates:
    """A collector that finds and deletes checkpoints from which nothing will start again.

    Args:
        store: The database and the files.
        clock: Determines when to read the trials of other studies again.
        shared: Whether other processes currently train studies of the same plan.
    """

    def __init__(self, store: Store, *, clock: Clock, shared: bool) -> None:
        self._store = store
        self._clock = clock
        self._shared = shared
        self._others: set[tuple[int, int]] = set()
        """The states that trials of other studies have reached, by node and epoch."""
        self._looked_at: float | None = None

    def find(self, ledger: Ledger) -> Sequence[CheckpointRef]:
        """Return the checkpoints to delete; delete their records, then call ``delete``."""
        if not ledger.touched or not self._look(ledger):
            return ()
        nodes = sorted(ledger.touched)
        ledger.touched.clear()

        def stands(node: int, epoch: int) -> bool:
            return (node, epoch) in ledger.stands or (node, epoch) in self._others

        return [ref for node in nodes for ref in superseded(ledger.plan, node, stands=stands)]

    def delete(self, ledger: Ledger, refs: Sequence[CheckpointRef]) -> None:
        """Delete the files of checkpoints whose records are gone."""
        for ref in refs:
            ledger.plan.drop(ref)
            ledger.kept_bytes -= ref.num_bytes
            self._store.checkpoints.delete(ref)

    def _look(self, ledger: Ledger) -> bool:
        """Read the states of other studies' trials; return False if the read must wait."""
        now = self._clock.monotonic()
        if self._looked_at is not None:
            if not self._shared:
                return True  # the lease keeps other processes from training
            if now - self._looked_at < LOOK_S:
                return False
        try:
            ends = self._store.plans.ends(ledger.plan_id, but=ledger.study_id)
        except StoreUnreachableError:
            return False  # files may stay a little longer: records cannot be written now either
        if any(node >= len(ledger.plan.nodes) for node, _ in ends):
            return False  # another process just added a node; the plan must learn of it
        self._others = {(ledger.plan.owner(node, epoch).id, epoch) for node, epoch in ends}
        self._looked_at = now
        return True
