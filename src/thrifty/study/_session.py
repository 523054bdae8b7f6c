"""One run of a study: executor, progress, signals and stop conditions around the loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Literal, Self

from thrifty.core import fingerprint
from thrifty.run import ExecutorConfig
from thrifty.store import Heartbeat, Lease, Store, StudyInfo, StudyMoved

from ._archive import Archive
from ._ledger import Ledger
from ._loop import Observer, Parts, run_loop, tell, tell_news
from ._packing import Packing
from ._passed_states import PassedStates
from ._progress import Progress
from ._results import best_of
from ._spared_heap import spared_heap
from ._stop import StopOnSignal, StopWhen
from ._threads import with_threads_of
from ._trial_events import StudyBegan, StudyEnded, TrialAdvanced, TrialBegan, TrialEnded


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
    executor = with_threads_of(ledger.plan_id, executor, store=store, name=archive.name)
    ledger.threads = executor.threads
    driver = store.drive(lease, revision=ledger.revision)
    driver.record([StudyMoved(study=ledger.study_id, state="running")])
    watching = [*observers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(spared_heap())
        if lease.shared:
            stack.enter_context(Heartbeat(lease))
        if progress:
            bar = Progress(archive.name, ledger, clock=clock)
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
            driver=driver,
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
            passed=PassedStates(store, clock=clock, shared=lease.shared),
        )
        ending = stack.enter_context(_Ending(watching, ledger))
        _begin(archive, ledger, watching, info=lease.study)
        done = run_loop(parts, stop_requested=lambda: asked.requested() or bool(reason()))
        ending.state = "done" if done else "stopped"
    driver.record([StudyMoved(study=ledger.study_id, state=ending.state)])
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


def _begin(
    archive: Archive, ledger: Ledger, observers: Sequence[Observer], *, info: StudyInfo
) -> None:
    """Tells observers how the study stands, and then what was learned when it was read."""
    goals, news = archive.recipe.goals, ledger.news
    key = {"plan": archive.recipe.plan_identity(), "name": info.name, "at": info.created_at}
    began = StudyBegan(
        study=info.name,
        key=fingerprint(key),
        metrics=goals.metrics,
        modes=goals.modes,
        resumed=len(ledger.history) > 0,
    )
    tell(observers, began)
    stood = {e.trial: e.first_epoch - 1 for e in news if isinstance(e, TrialAdvanced)}
    ended = {e.trial for e in news if isinstance(e, TrialEnded)}
    for trial in ledger.history:
        may_go_on = trial.state == "running" or (
            trial.state == "waiting" and trial.reached < ledger.max_epochs
        )
        if may_go_on or trial.number in ended:
            at = stood.get(trial.number, trial.reached)
            one = TrialBegan(
                trial=trial.number, config=trial.config, parent=trial.parent, epoch=at
            )
            tell(observers, one)
    tell_news(observers, ledger)


class _Ending:
    """Tells observers how a run ended, whatever ended it."""

    def __init__(self, observers: Sequence[Observer], ledger: Ledger) -> None:
        self.state: Literal["done", "stopped", "failed"] = "failed"
        self._observers = observers
        self._ledger = ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        best = best_of(self._ledger)
        ended = StudyEnded(
            state=self.state,
            best_trial=None if best is None else best.number,
            best_value=None if best is None else self._ledger.goals.sign * best.objectives[0],
        )
        tell(self._observers, ended)


def _never() -> str:
    return ""
