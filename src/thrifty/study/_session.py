"""One run of a study: executor, progress, signals and stop conditions around the loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from thrifty.run import ExecutorConfig
from thrifty.store import Lease, Store

from ._archive import Archive
from ._ledger import Ledger
from ._loop import Observer, Parts, run_loop
from ._packing import Packing
from ._progress import Progress
from ._stop import StopOnSignal, StopWhen


logger = logging.getLogger(__name__)


def train(
    archive: Archive,
    ledger: Ledger,
    *,
    store: Store,
    lease: Lease,
    executor: ExecutorConfig,
    stop: StopWhen | None,
    progress: bool,
    observers: Sequence[Observer],
) -> None:
    """Trains until the algorithm is done or somebody wants it to stop, and notes which of the two it was."""
    recipe, clock = archive.recipe, archive.clock
    store.studies.finish(ledger.study_id, state="running")
    watching = [*observers]
    with contextlib.ExitStack() as stack:
        if progress:
            bar = Progress(archive.name, recipe.goals.metrics[0], clock)
            watching.append(stack.enter_context(bar))
        asked = stack.enter_context(StopOnSignal())
        reason = _never if stop is None else stop.watch(ledger, clock)
        curves = store.curves.all()
        workers = executor.open(
            recipe.task,
            checkpoints=store.checkpoints.root,
            folder=recipe.plan_identity(),
            curves=curves,
        )
        stack.callback(workers.close)
        parts = Parts(
            ledger=ledger,
            algorithm=recipe.algorithm,
            space=recipe.space,
            executor=workers,
            store=store,
            lease=lease,
            clock=clock,
            seed=recipe.seed,
            plan_id=ledger.plan_id,
            disk_budget_bytes=archive.storage.disk_budget_bytes,
            observers=watching,
            packing=Packing(
                num_workers=executor.num_workers,
                fixed_size=executor.pack_size,
                memory_margin=executor.memory_margin,
                known=curves.keys(),
            ),
        )
        done = run_loop(parts, stop_requested=lambda: asked.requested() or bool(reason()))
    store.studies.finish(ledger.study_id, state="done" if done else "stopped")
    if not done:
        why = f": {reason()}" if reason() else ""
        logger.warning("study %r was stopped%s; run it again to go on", archive.name, why)
    elif ledger.history.enqueued:
        logger.warning(
            "study %r is done, but %d enqueued configurations were not tried: %r has as many trials as it takes; "
            "try them in a study of another name with more trials and warm_start=%r",
            archive.name,
            len(ledger.history.enqueued),
            recipe.algorithm,
            archive.name,
        )


def _never() -> str:
    return ""
