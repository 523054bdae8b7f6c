"""A study: a task, a space, an algorithm, and the loop that brings them together."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from thrifty.core import (
    CheckpointError,
    Clock,
    MissingExtraError,
    StudyMismatchError,
    SystemClock,
    ThriftyError,
    UsageError,
    fingerprint,
)
from thrifty.pack import Task, Trainable
from thrifty.plan import ForestStage, SearchPlan, stage_forest
from thrifty.run import ExecutorConfig, Local, model_of, state_from_arrays, train_alone
from thrifty.search import Algorithm
from thrifty.space import Space
from thrifty.store import Store, StudyInfo

from ._check import check_arguments, check_study
from ._forecast import Forecast, forecast
from ._ledger import Ledger
from ._loop import Observer, Parts, run_loop
from ._packing import Packing
from ._progress import Progress
from ._results import Savings, TrialResult
from ._storage import Storage


if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


logger = logging.getLogger(__name__)

IDENTITY_VERSION = 2
"""Part of a plan's identity; raised when the meaning of seeds, epochs or states changes."""


class Study:
    """Tunes a task over a space with an algorithm, training every shared step once.

    Args:
        task: what one trial trains.
        space: the hyper-parameters.
        algorithm: what to try, how far (``Hyperband``, ``ASHA``, ``GridSearch``, ...).
        metric: the metric of the task to optimise.
        mode: ``"max"`` or ``"min"``.
        storage: a database address (or ``Storage``, which also says where checkpoints go and how much they may take).
        name: its name in the database; a study of this name goes on where it stopped.
        seed: of initialisation, data order, dropout and sampling, the same for all trials.

    Nothing is opened or trained before ``run``. Raises UsageError for arguments that cannot work.

    >>> import thrifty as th
    >>> from thrifty.testing import LineTask
    >>> study = th.Study(LineTask(), th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
    ...                  algorithm=th.GridSearch(max_epochs=4), metric="mse", mode="min",
    ...                  storage="sqlite://", name="line")
    >>> _ = study.run(progress=False)
    >>> study.savings.trial_epochs, study.savings.unique_epochs
    (8, 6)
    """

    def __init__(
        self,
        task: Task | Trainable,
        space: Space,
        *,
        algorithm: Algorithm,
        metric: str,
        mode: Literal["max", "min"] = "max",
        storage: Storage | str = "sqlite:///thrifty.db",
        name: str,
        seed: int = 0,
    ) -> None:
        check_arguments(task, space, algorithm=algorithm, metric=metric, mode=mode)
        self.task = task
        self.space = space
        self.algorithm = algorithm
        self.metric = metric
        self.mode = mode
        self.storage = Storage.of(storage)
        self.name = name
        self.seed = seed
        self.file: Path | None = None
        """The file that defines it, so that it can be resumed by name alone; the command line sets it."""
        self._clock: Clock = SystemClock()
        self._ledger: Ledger | None = None

    def __repr__(self) -> str:
        return f"Study({self.name!r}, {self.algorithm!r}, storage={self.storage.url!r})"

    # -- before -----------------------------------------------------------------------

    def plan(self) -> Forecast:
        """How much there is to train, with sharing and without; trains nothing.

        Raises:
            UsageError: space, task, algorithm and metric do not fit together.
        """
        self.space.check(max_epochs=self.algorithm.max_epochs)
        return forecast(
            self.algorithm, self.space, seed=self.seed, epoch_seconds=self._epoch_seconds()
        )

    # -- during -----------------------------------------------------------------------

    def run(
        self,
        *,
        executor: ExecutorConfig | None = None,
        progress: bool = True,
        observers: Sequence[Observer] = (),
    ) -> Study:
        """Trains until the algorithm is done, or goes on with a study that was stopped; returns itself.

        Ctrl-C stops it cleanly: workers keep their state at the end of the epoch, and a later ``run`` goes on from
        there (a second Ctrl-C stops at once). A study that is done already is only read.

        Raises:
            UsageError: it cannot work (before any training).
            StudyMismatchError: the database has a different study of this name.
            StoreBusyError: another process runs a study of this task and seed.
            StoreWriteError: full disk, read-only place.
        """
        with self._open() as store:
            info = store.studies.find(self.name)
            if info is not None:
                self._check_same(info, store)
                if info.state == "done":
                    self._ledger = self._load(store, info)
                    return self
            check_study(
                self.task,
                self.space,
                algorithm=self.algorithm,
                metric=self.metric,
                seed=self.seed,
            )
            self._run(store, executor or Local(), progress=progress, observers=observers)
        return self

    def _run(
        self,
        store: Store,
        executor: ExecutorConfig,
        *,
        progress: bool,
        observers: Sequence[Observer],
    ) -> None:
        identity = self._identity()
        plan = store.plans.open(identity, task=type(self.task).__qualname__)
        with store.plans.acquire(plan.id, study=self.name) as lease:
            info = store.studies.find(self.name) or store.studies.create(
                self.name, plan=plan.id, spec=self._spec()
            )
            self._ledger = ledger = self._load(store, info)
            watching = [*observers]
            with contextlib.ExitStack() as stack:
                if progress:
                    watching.append(
                        stack.enter_context(Progress(self.name, self.metric, self._clock))
                    )
                stop = stack.enter_context(_StopOnSignal())
                curves = store.curves.all()
                workers = executor.open(
                    self.task,
                    checkpoints=store.checkpoints.root,
                    folder=identity,
                    curves=curves,
                )
                stack.callback(workers.close)
                parts = Parts(
                    ledger=ledger,
                    algorithm=self.algorithm,
                    space=self.space,
                    executor=workers,
                    store=store,
                    lease=lease,
                    clock=self._clock,
                    seed=self.seed,
                    plan_id=plan.id,
                    disk_budget_bytes=self.storage.disk_budget_bytes,
                    observers=watching,
                    packing=Packing(
                        num_workers=executor.num_workers,
                        fixed_size=executor.pack_size,
                        memory_margin=executor.memory_margin,
                        known=curves.keys(),
                    ),
                )
                done = run_loop(parts, stop_requested=stop.requested)
            store.studies.finish(info.id, state="done" if done else "stopped")
        if not done:
            logger.warning("study %r was stopped; run it again to go on", self.name)

    # -- after ------------------------------------------------------------------------

    @property
    def trials(self) -> list[TrialResult]:
        """All trials so far, in order."""
        return [self._result(number) for number in range(len(self._books().history))]

    @property
    def best_trial(self) -> TrialResult:
        """The trial with the best metric where its training stands. Failed ones never are.

        Raises:
            ThriftyError: no trial has reported yet, or all have failed (with the first failure).
        """
        history = self._books().history
        reached = [
            n
            for n in range(len(history))
            if history[n].reached and history[n].state != "failed"
        ]
        if reached:
            return self._result(max(reached, key=lambda n: (history[n].scores[-1], -n)))
        errors = self._books().errors
        if not errors:
            raise ThriftyError(f"study {self.name!r} has no results yet; run it first")
        _, message, traceback = errors[min(errors)]
        raise ThriftyError(
            f"all trials of study {self.name!r} that ended have failed; the first one: {message}\n{traceback}"
        )

    @property
    def savings(self) -> Savings:
        """What was saved so far."""
        ledger = self._books()
        seen: dict[tuple[int, int], tuple[float, float]] = {}
        alone, trial_epochs = 0.0, 0
        for number in range(len(ledger.history)):
            reached = ledger.history[number].reached
            trial_epochs += reached
            node = ledger.node_of[number]
            for epoch in range(reached, 0, -1):
                owner = ledger.plan.owner(node, epoch).id
                seen[owner, epoch] = ledger.seconds.get((owner, epoch), (0.0, 0.0))
                alone += seen[owner, epoch][1]
        return Savings(
            trial_epochs=trial_epochs,
            unique_epochs=len(seen),
            seconds_alone=alone,
            seconds_shared=sum(by_itself for _, by_itself in seen.values()),
            seconds=sum(spent for spent, _ in seen.values()),
        )

    def forest(self) -> list[ForestStage]:
        """The stage forest as it stands."""
        ledger = self._books()
        ends: dict[tuple[int, int], int] = {}
        for number in range(len(ledger.history)):
            end = (ledger.node_of[number], ledger.history[number].target)
            ends[end] = ends.get(end, 0) + 1
        return stage_forest(ledger.plan, ends=ends)

    def trials_dataframe(self) -> pd.DataFrame:
        """One row for each trial: number, state, epochs, value, error, and each hyper-parameter.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pandas = _optional("pandas", extra="dataframe")
        rows = [
            {
                "number": t.number,
                "state": t.state,
                "epochs": t.epochs,
                "value": t.value,
                "error": t.error,
                **{f"params_{name}": value for name, value in t.config.items()},
            }
            for t in self.trials
        ]
        frame: pd.DataFrame = pandas.DataFrame(rows)
        return frame

    def plot_learning_curves(self) -> Figure:
        """The metric of every trial over epochs (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().learning_curves(
            self.trials, metric=self.metric, mode=self.mode
        )
        return figure

    def plot_forest(self) -> Figure:
        """The stage forest: what was trained once, and how many trials share it (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().stage_forest(
            self.forest(), metric=self.metric, saved_epochs=self.savings.epochs
        )
        return figure

    # -- inside -----------------------------------------------------------------------

    def _open(self, *, create: bool = True) -> Store:
        return Store.open(
            self.storage.url,
            checkpoints=self.storage.checkpoints,
            clock=self._clock,
            create=create,
        )

    def _identity(self) -> str:
        return fingerprint({
            "task": dict(self.task.identity()),
            "seed": self.seed,
            "version": IDENTITY_VERSION,
        })

    def _spec(self) -> dict[str, Any]:
        return {
            "task": dict(self.task.identity()),
            "space": self.space.to_json(),
            "algorithm": repr(self.algorithm),
            "max_epochs": self.algorithm.max_epochs,
            "metric": self.metric,
            "mode": self.mode,
            "seed": self.seed,
            "file": self._file(),
        }

    def _file(self) -> str | None:
        module = sys.modules.get(type(self.task).__module__)
        path = self.file or getattr(module, "__file__", None)
        return None if path is None else str(Path(path).resolve())

    def _check_same(self, info: StudyInfo, store: Store) -> None:
        mine = self._spec()
        differing = [
            f"{key} was {info.spec.get(key)!r} and is {mine[key]!r}"
            for key in mine
            if key not in ("file", "task") and info.spec.get(key) != mine[key]
        ]
        if store.plans.open(self._identity(), task="").id != info.plan:
            differing.append("the task's code, attributes or seed have changed")
        if differing:
            raise StudyMismatchError(
                f"{self.storage.url} has a different study {self.name!r}: {'; '.join(differing)}. "
                "Give this one another name, or restore what has changed"
            )

    def _load(self, store: Store, info: StudyInfo) -> Ledger:
        cuts = self.space.branch_epochs(max_epochs=self.algorithm.max_epochs)
        ledger = Ledger(
            SearchPlan(cuts=cuts),
            metric=self.metric,
            mode=self.mode,
            max_epochs=self.algorithm.max_epochs,
            clock=self._clock,
            study_id=info.id,
            plan_id=info.plan,
        )
        ledger.load_plan(store.plans.load(info.plan))
        ledger.load_study(store.studies.load(info.id))
        return ledger

    def _books(self) -> Ledger:
        """The books of this process, or those in the store."""
        if self._ledger is None:
            with self._open(create=False) as store:
                self._ledger = self._load(store, store.studies.get(self.name))
        return self._ledger

    def _epoch_seconds(self) -> float | None:
        """The mean time of an epoch of this task, if some were timed."""
        try:
            seconds = self._books().seconds
        except ThriftyError:
            return None
        spent = [each for each, _ in seconds.values()]
        return sum(spent) / len(spent) if spent else None

    def _result(self, number: int) -> TrialResult:
        ledger = self._books()
        trial = ledger.history[number]
        curve = tuple(ledger.value(score) for score in trial.scores)
        state: Any = trial.state
        if state == "waiting":
            state = "done" if trial.reached >= self.algorithm.max_epochs else "paused"
        _, message, traceback = ledger.errors.get(number, ("", "", ""))
        return TrialResult(
            number=number,
            config=trial.config,
            state=state,
            epochs=trial.reached,
            value=curve[-1] if curve and math.isfinite(curve[-1]) else None,
            curve=curve,
            error=f"{message}\n{traceback}".strip(),
            parent=trial.parent,
            _load=lambda: self._load_model(number),
        )

    def _load_model(self, number: int) -> torch.nn.Module:
        ledger = self._books()
        epochs = ledger.history[number].reached
        if not epochs:
            raise UsageError(f"trial {number} has not reported yet: there is no model to load")
        node = ledger.plan.owner(ledger.node_of[number], epochs)
        timeline = ledger.plan.nodes[ledger.node_of[number]].timeline
        ref = node.checkpoints.get(epochs)
        state = None
        if ref is not None:
            with self._open(create=False) as store:
                try:
                    state = (epochs, state_from_arrays(*store.checkpoints.read(ref)))
                except CheckpointError as error:
                    logger.warning("%s; training trial %d again", error, number)
        backend, _ = train_alone(
            self.task, timeline, seed=self.seed, epochs=epochs, state=state
        )
        return model_of(backend)


def _optional(module: str, *, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(module, extra=extra) from None


def _plots() -> Any:
    _optional("matplotlib", extra="plots")
    return import_module("thrifty.study._plots")


class _StopOnSignal:
    """Ctrl-C and SIGTERM ask for a clean stop; the second time they act at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return self._asked

    def __enter__(self) -> _StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        logger.warning("stopping at the end of the epoch; once more to stop at once")
