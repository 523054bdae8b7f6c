"""Checkpoints that were only passed, deleted while a study runs.

An algorithm that looks at every epoch makes a worker keep every epoch. Most of these states are
needed only until the next one is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from thrifty.core import CheckpointRef, Clock, StoreUnreachableError
from thrifty.plan import superseded
from thrifty.store import Store

from ._ledger import Ledger


LOOK_S = 5.0
"""How often the trials of other studies are read where other processes train them."""


class PassedStates:
    """Finds and deletes the checkpoints that nothing will start from again.

    Args:
        store: The database and the files.
        clock: Says when to read again where other trials stand.
        shared: Whether other processes train studies of the same plan now.
    """

    def __init__(self, store: Store, *, clock: Clock, shared: bool) -> None:
        self._store = store
        self._clock = clock
        self._shared = shared
        self._others: set[tuple[int, int]] = set()
        """Where trials of other studies are, by node and epoch."""
        self._looked_at: float | None = None

    def find(self, ledger: Ledger) -> Sequence[CheckpointRef]:
        """The checkpoints to delete; their records go first, and then ``delete`` the files."""
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
        """Read where trials of other studies are; False if that has to wait."""
        now = self._clock.monotonic()
        if self._looked_at is not None:
            if not self._shared:
                return True  # a lease keeps all others from training
            if now - self._looked_at < LOOK_S:
                return False
        try:
            ends = self._store.plans.ends(ledger.plan_id, but=ledger.study_id)
        except StoreUnreachableError:
            return False  # files may stay a little longer; what has to be written waits for the server
        if any(node >= len(ledger.plan.nodes) for node, _ in ends):
            return False  # another process has just added it; the plan learns of it first
        self._others = {(ledger.plan.owner(node, epoch).id, epoch) for node, epoch in ends}
        self._looked_at = now
        return True
