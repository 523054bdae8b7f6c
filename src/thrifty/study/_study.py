"""A study: a task, a space, an algorithm, and the loop that brings them together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from thrifty.core import (
    Clock,
    StudyNotFoundError,
    SystemClock,
    ThriftyError,
    UsageError,
    derive_seed,
)
from thrifty.pack import Task, Trainable
from thrifty.plan import ForestStage, stage_forest
from thrifty.run import ExecutorConfig, Faults, Local
from thrifty.run._simulated import EpochSeconds
from thrifty.search import Algorithm
from thrifty.space import Space
from thrifty.store import FrameBackend, frame, nondominated, redact_url

from ._archive import Archive, Source
from ._arguments import check_max_epochs, check_run, checked_name, checked_seed
from ._check import check_arguments, check_study
from ._complete import complete
from ._forecast import Forecast, forecast
from ._goals import Bound, Goals, Mode
from ._identity import Recipe
from ._ledger import Ledger
from ._loop import Observer
from ._pictures import Pictures
from ._reader import Reader
from ._results import Savings, TrialResult, candidates, rows, savings, trial_result
from ._session import say_where_from, train
from ._simulate import simulate
from ._simulation_report import Simulation
from ._stop import StopWhen
from ._storage import Storage
from ._warm_start import prior_trials


if TYPE_CHECKING:
    import pandas as pd
    import polars as pl


class Study(Pictures):
    """Tunes a task over a space with an algorithm, training every shared step once.

    Args:
        task: what one trial trains.
        space: the hyper-parameters.
        algorithm: what to try, how far (``Hyperband``, ``ASHA``, ``GridSearch``, ...).
        metric: the metric of the task to optimise, or a list of them; algorithms compare trials by the first.
        mode: ``"max"`` or ``"min"``; for a list of metrics a list.
        constraints: limits on metrics: a number that must not be exceeded, or ``at_least(number)``. A trial that
            keeps them is better than any that does not; of those, the one that breaks them least is the best.
        storage: a database address (or ``Storage``, which also says where checkpoints go and how much they may take).
        name: its name in the database; a study of this name goes on where it stopped.
        seed: of initialisation, data order, dropout and sampling, the same for all trials.
        warm_start: earlier studies that samplers learn from: names in the same database, or studies. Their trials
            are copied when this study is made.

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

    def __init__(  # noqa: PLR0913 (all that a study is made of)
        self,
        task: Task | Trainable,
        space: Space,
        *,
        algorithm: Algorithm,
        metric: str | Sequence[str],
        mode: Mode | Sequence[Mode] = "max",
        constraints: Mapping[str, Bound | float] | None = None,
        storage: Storage | str = "sqlite:///thrifty.db",
        name: str,
        seed: int = 0,
        warm_start: str | Study | Sequence[str | Study] = (),
    ) -> None:
        check_arguments(task, space, algorithm=algorithm)
        check_max_epochs(algorithm)
        self.task = task
        self.space = space
        self.algorithm = algorithm
        self.goals = Goals.of(metric, mode, constraints=constraints)
        self.storage = Storage.of(storage)
        self.name = checked_name(name)
        self.seed = checked_seed(seed)
        self.file: Path | None = None
        """The file that defines it, so that it can be resumed by name alone; the command line sets it."""
        self._earlier = _studies(warm_start)
        self._enqueued: list[Mapping[str, Any]] = []
        """All that this object was asked to enqueue, whether it is in the store or not."""
        self._clock: Clock = SystemClock()
        self._reader = Reader()

    def __repr__(self) -> str:
        return f"Study({self.name!r}, {self.algorithm!r}, storage={redact_url(self.storage.url)!r})"

    @property
    def metric(self) -> str:
        """The metric to optimise; of several the first."""
        return self.goals.metrics[0]

    @property
    def mode(self) -> Mode:
        """What is to be done with it."""
        return self.goals.modes[0]

    # -- before -----------------------------------------------------------------------

    def plan(self) -> Forecast:
        """How much there is to train, with sharing and without; trains nothing.

        Raises:
            UsageError: space, task, algorithm and metric do not fit together.
            StudyNotFoundError: there is no study to learn from of the name that was given.
        """
        self.space.check(max_epochs=self.algorithm.max_epochs)
        archive = self._archive()
        enqueued, priors = archive.foreseen(self._enqueued, self._sources())
        return forecast(
            self.algorithm,
            self.space,
            goals=self.goals,
            seed=self.seed,
            epoch_seconds=self._epoch_seconds(),
            enqueued=enqueued,
            prior=prior_trials(priors, self.goals),
            known=archive.known(),
        )

    def simulate(
        self,
        *,
        workers: int,
        epoch_s: EpochSeconds | None = None,
        faults: Faults | None = None,
        share: bool = True,
    ) -> Simulation:
        """Plays the study through on made-up workers and results: how long and how much it would be; trains nothing.

        Args:
            workers: how many, each training one trial at a time.
            epoch_s: seconds of an epoch, or a function of the values of the hyper-parameters in that epoch; None: as
                measured by earlier runs of this study.
            faults: failures, stragglers, preemptions.
            share: False: each trial trains all of its epochs itself. See ``simulate`` for more.

        Raises:
            UsageError: no epoch was timed yet and ``epoch_s`` is not given; or see ``simulate``.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(LineTask(), th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])), metric="mse", mode="min",
        ...                  algorithm=th.GridSearch(max_epochs=4), name="line", storage="sqlite://")
        >>> study.simulate(workers=2, epoch_s=60.0).end_to_end_s
        240.0
        """
        measured_s = self._epoch_seconds() if epoch_s is None else epoch_s
        if measured_s is None:
            raise UsageError(
                f"no epoch of study {self.name!r} has been timed yet: give simulate(epoch_s=...), or run it for a while"
            )
        return simulate(
            self.algorithm,
            self.space,
            metric=self.metric,
            mode=self.mode,
            workers=workers,
            epoch_s=measured_s,
            faults=faults,
            share=share,
            seed=self.seed,
        )

    def enqueue_trial(self, config: Mapping[str, Any]) -> None:
        """Has a configuration tried first, by this run or the next one; what it leaves out is drawn from the space.

        It is kept in the database (if the study is not there yet, as soon as ``run`` makes it), so an interruption does
        not lose it. What was enqueued before is not enqueued again, so a script may be run again.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(LineTask(), th.Space(lr=th.Float(0.01, 0.1)), metric="mse", mode="min", name="line",
        ...                  algorithm=th.RandomSearch(max_epochs=2, num_trials=3), storage="sqlite://")
        >>> study.enqueue_trial({"lr": 0.05})
        >>> study.run(progress=False).trials[0].config
        {'lr': 0.05}

        Raises:
            SpaceError: it has a name or a value that is not in the space.
            StudyMismatchError: the database has a different study of this name.
        """
        rng = np.random.default_rng(derive_seed(self.seed, "enqueue", len(self._enqueued)))
        self._enqueued.append(complete(self.space, config, rng=rng))
        archive = self._archive()
        with contextlib.suppress(StudyNotFoundError), archive.open(create=False) as store:
            info = archive.find(store)
            if info is not None:
                archive.enqueue(store, info, self._enqueued)

    # -- during -----------------------------------------------------------------------

    def run(
        self,
        *,
        executor: ExecutorConfig | None = None,
        stop: StopWhen | None = None,
        progress: bool = True,
        observers: Sequence[Observer] = (),
    ) -> Study:
        """Trains until the algorithm is done, or goes on with a study that was stopped; returns itself.

        Ctrl-C stops it cleanly: workers keep their state at the end of the epoch, and a later ``run`` goes on from
        there (a second Ctrl-C stops at once). ``stop`` does the same at a number of epochs, after some time or at a
        target. A study that is done already is only read, unless something was enqueued since.

        Raises:
            UsageError: it cannot work (before any training).
            StudyMismatchError: the database has a different study of this name.
            StudyNotFoundError: there is no study to learn from of the name that was given.
            StoreBusyError: another process runs this study, or (unless the storage is shared) one of this task and seed.
            StoreUnreachableError: the server of the database has not answered for minutes.
            StoreWriteError: full disk, read-only place.
        """
        check_run(executor, stop, observers)
        archive = self._archive()
        with archive.open() as store:
            info = archive.find(store)
            if info is not None:
                archive.enqueue(store, info, self._enqueued)
                if info.state == "done":
                    known = self._reader.read(archive, store)
                    if not known.history.enqueued:
                        say_where_from(archive, known, store=store, progress=progress)
                        return self
            with archive.recipe.watched(fresh=info is None):
                report = check_study(
                    self.task,
                    self.space,
                    algorithm=self.algorithm,
                    goals=self.goals,
                    seed=self.seed,
                )
                if report is None or not report.pure:
                    archive = archive.joined()
                info = archive.find(store) or archive.make(
                    store,
                    plan=archive.open_plan(store).id,
                    file=self._file(),
                    enqueued=self._enqueued,
                    sources=self._sources(),
                )
                with (
                    store.lease(info, shared=self.storage.is_shared) as lease,
                    self._reader.running(archive, store, info) as ledger,
                ):
                    train(
                        archive,
                        ledger,
                        store=store,
                        lease=lease,
                        executor=executor or Local(),
                        stop=stop,
                        progress=progress,
                        observers=observers,
                    )
        return self

    # -- after ------------------------------------------------------------------------

    @property
    def trials(self) -> list[TrialResult]:
        """All trials so far, in order."""
        ledger = self._books()
        return [self._result(ledger, number) for number in range(len(ledger.history))]

    @property
    def best_trial(self) -> TrialResult:
        """The feasible trial with the best metric where its training stands. Failed ones never are.

        Raises:
            ThriftyError: no trial has reported yet, all have failed (with the first failure), or none is feasible.
            UsageError: there are several objectives.
        """
        if len(self.goals.metrics) > 1:
            raise UsageError(
                f"study {self.name!r} has several objectives ({', '.join(self.goals.metrics)}), so there may be no "
                "best trial; use best_trials, those that no other one beats in all of them"
            )
        ledger = self._books()
        found = candidates(ledger, name=self.name)
        best = max(found, key=lambda t: (t.objectives[0], -t.number))
        return self._result(ledger, best.number)

    @property
    def best_trials(self) -> list[TrialResult]:
        """The Pareto front: feasible trials that no other one dominates where their training stands.

        A trial dominates another if it is in no objective worse and in one better; trials that are equal in all
        objectives are all there. With one objective: all trials that are as good as the best.

        Raises:
            ThriftyError: no trial has reported yet, all have failed (with the first failure), or none is feasible.
        """
        ledger = self._books()
        found = candidates(ledger, name=self.name)
        front = nondominated([trial.objectives for trial in found])
        return [self._result(ledger, found[index].number) for index in front]

    @property
    def savings(self) -> Savings:
        """What was saved so far."""
        return savings(self._books())

    def forest(self) -> list[ForestStage]:
        """The stage forest as it stands."""
        ledger = self._books()
        ends: dict[tuple[int, int], int] = {}
        for number in range(len(ledger.history)):
            end = (ledger.node_of[number], ledger.history[number].target)
            ends[end] = ends.get(end, 0) + 1
        return stage_forest(ledger.plan, ends=ends)

    @overload
    def trials_dataframe(self, *, backend: Literal["pandas"] = "pandas") -> pd.DataFrame: ...

    @overload
    def trials_dataframe(self, *, backend: Literal["polars"]) -> pl.DataFrame: ...

    def trials_dataframe(
        self, *, backend: FrameBackend = "pandas"
    ) -> pd.DataFrame | pl.DataFrame:
        """One row for each trial: number, state, epochs, value, error, and each hyper-parameter.

        Several objectives have a column each (``values_accuracy``); with constraints there is the violation.

        Raises:
            MissingExtraError: pandas or polars is not installed.
            UsageError: ``backend`` is neither.
        """
        return frame(rows(self.trials, self.goals), backend=backend)  # type: ignore[no-any-return]

    # -- inside -----------------------------------------------------------------------

    def _archive(self) -> Archive:
        recipe = Recipe(
            task=self.task,
            space=self.space,
            algorithm=self.algorithm,
            goals=self.goals,
            seed=self.seed,
            warm_start=tuple(s if isinstance(s, str) else s.name for s in self._earlier),
        )
        return Archive(recipe=recipe, storage=self.storage, name=self.name, clock=self._clock)

    def _sources(self) -> list[Source]:
        return [s if isinstance(s, str) else (s._archive(), s._books()) for s in self._earlier]

    def _file(self) -> str | None:
        module = sys.modules.get(type(self.task).__module__)
        path = self.file or getattr(module, "__file__", None)
        return None if path is None else str(Path(path).resolve())

    def _books(self) -> Ledger:
        """What is known of the study now: by the run in this process, or in the database."""
        return self._reader.current(self._archive())

    def _epoch_seconds(self) -> float | None:
        """The mean time of an epoch of this task, if some were timed."""
        try:
            times = self._books().times
        except ThriftyError:
            return None
        spent = [each.seconds for each in times.values()]
        return sum(spent) / len(spent) if spent else None

    def _result(self, ledger: Ledger, number: int) -> TrialResult:
        return trial_result(
            ledger, number, load=lambda: self._archive().load_model(ledger, number)
        )


def _studies(given: object) -> tuple[str | Study, ...]:
    studies = (given,) if isinstance(given, str | Study) else given
    if not isinstance(studies, Sequence) or not all(
        isinstance(s, str | Study) for s in studies
    ):
        raise UsageError(
            f"warm_start is {given!r}; give the name of an earlier study, the study, or a list of these"
        )
    return tuple(studies)
