"""What a run keeps besides its records: states, pack curves, threads, and the disk budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from thrifty.core import (
    Calibrated,
    CheckpointRef,
    Clock,
    Event,
    PackShrunk,
    StoreUnreachableError,
    UsageError,
    plain_logger,
)
from thrifty.perf import PackCurve
from thrifty.plan import Chain, Measured, SearchPlan, evictable_checkpoints, pack_size, superseded
from thrifty.run import ExecutorConfig, Local
from thrifty.run._local import num_cores
from thrifty.store import CheckpointRemoved, Driver, Store
from thrifty.store._plan_files import base_bytes

from ._ledger import Ledger
from ._results import best_ones


logger = plain_logger(__name__)


class DiskBudget:
    """A limit on the bytes of checkpoints; deletes checkpoints that exceed it.

    Args:
        budget_bytes: How many bytes the checkpoints of the plan may take.
        folder: The plan's folder, whose bases are within the budget, too.
        other_bytes: How many bytes other files in their folder take, which cannot be removed.
    """

    def __init__(self, budget_bytes: float, *, folder: str = "", other_bytes: int = 0) -> None:
        self._bytes = budget_bytes
        self._folder = folder
        self._base_bytes: int | None = None
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
        if self._bytes == math.inf or (ledger.kept_bytes == self._tried_at and not done):
            return
        left = self._bytes - self._other_bytes - self._bases(ledger, store, again=False)
        if ledger.kept_bytes > left:
            left = self._bytes - self._other_bytes - self._bases(ledger, store, again=True)
        if ledger.kept_bytes <= left:
            return
        live = [] if done else [*ledger.live()]
        live += [
            (node, trial.reached)
            for trial in best_ones(ledger)
            for node in ledger.nodes_of[trial.number]
        ]
        try:
            others = store.plans.standing(ledger.plan_id, but=ledger.study_id)
        except StoreUnreachableError:
            return  # try again later: without the server, other studies' needs are unknown
        if any(node >= len(ledger.plan.nodes) for node, _ in others):
            return  # another process just added a node; the plan must learn of it
        live += others
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

    def _bases(self, ledger: Ledger, store: Store, *, again: bool) -> int:
        """Return the bytes of bases, which are there from the first checkpoint on."""
        if (self._base_bytes is None or again) and self._folder and ledger.kept_bytes:
            self._base_bytes = base_bytes(store.checkpoints, self._folder)
        return self._base_bytes or 0

    def _warn(self, ledger: Ledger) -> None:
        if self._warned:
            return
        self._warned = True
        others = [
            (self._other_bytes, "that killed runs have left"),
            (self._base_bytes or 0, "of bases (see Storage(max_base_bytes=...))"),
        ]
        said = " and ".join(f"{num:,} bytes {what}" for num, what in others if num)
        other = f", besides {said}" if said else ""
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


class Packing:
    """The choice of a pack size from the measurements and memory limits of workers.

    Before the first measurement, a worker trains one trial. ``fixed_size`` is a size that the user
    has set and that replaces the computed one; ``known`` holds the keys of measurements that the
    store already has.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        fixed_size: int | None = None,
        memory_margin: float = 0.9,
        known: Collection[str] = (),
    ) -> None:
        self._num_workers = num_workers
        self._fixed_size = fixed_size
        self._known = set(known)
        self._margin = memory_margin
        self._measured: dict[str, Measured] = {}
        self._limit: int | None = None

    def on_event(self, event: Event, store: Store) -> None:
        """Record measurements and out-of-memory reductions of a pack."""
        if isinstance(event, Calibrated):
            self._measured[event.key] = Measured(
                curves=tuple(PackCurve.from_json(dict(c)) for c in event.curves),
                memory_bytes=event.memory_bytes,
            )
            if event.key not in self._known:
                self._known.add(event.key)
                _keep(event, store)
        elif isinstance(event, PackShrunk):
            self._limit = event.size if self._limit is None else min(self._limit, event.size)

    def size(self, plan: SearchPlan, running: Iterable[Chain]) -> int:
        """Return the number of trials that each worker trains at a time."""
        size = self._fixed_size
        if size is None:
            size = pack_size(
                plan,
                list(self._measured.values()),
                running=running,
                workers=self._num_workers,
                memory_margin=self._margin,
            )
        return size if self._limit is None else min(size, self._limit)

    def epochs_to_come(self, plan: SearchPlan) -> float:
        """Return how many epochs of those that are asked for each worker has before it."""
        return max(0, plan.num_epochs_needed - plan.num_epochs_done) / self._num_workers


def _keep(event: Calibrated, store: Store) -> None:
    try:
        store.curves.put(
            event.key, device=event.device, structure=event.structure, curves=event.curves
        )
    except StoreUnreachableError as error:
        logger.warning("%s; another run will measure packs again", error)


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


def with_threads_of(
    plan: int, executor: ExecutorConfig, *, store: Store, name: str
) -> ExecutorConfig:
    """Return the executor with the number of CPU threads that its plan is trained with.

    The first run fixes the number: the executor's setting, or its default.

    Raises:
        UsageError: The executor asks for another number than the fixed one.
    """
    default = executor.default_threads
    if default is None:
        return executor
    fixed = store.plans.fix_threads(plan, executor.threads or default)
    if executor.threads not in (None, fixed):
        kind = type(executor).__name__
        raise UsageError(
            f"{kind}(threads={executor.threads}): what study {name!r} shares was trained with "
            f"{fixed} CPU "
            f"threads for each worker, and results may depend on that in the last bits; leave "
            f"threads out, "
            f"give threads={fixed}, or use another seed or database to begin anew"
        )
    total = fixed * executor.num_workers
    if isinstance(executor, Local) and fixed > 1 and total > max(num_cores(), fixed):
        logger.warning(
            "study %r keeps the %d CPU threads for each worker that its first run had: %d "
            "workers use %d "
            "threads on %d cores; fewer workers may be as fast",
            name,
            fixed,
            executor.num_workers,
            total,
            num_cores(),
        )
    return executor.with_threads(fixed)
