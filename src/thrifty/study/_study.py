"""A study: a task, a space, an algorithm, and the loop that combines them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

from thrifty.core import (
    Clock,
    StudyNotFoundError,
    SystemClock,
    ThriftyError,
    UsageError,
    plain_logger,
    with_advice,
)
from thrifty.pack import SelfDescribing, Task, Trainable
from thrifty.plan import ForestStage
from thrifty.run import ExecutorConfig, Faults, Local
from thrifty.run._ask_tell import AskTell, check_trains
from thrifty.run._simulated import EpochSeconds
from thrifty.search import Algorithm, Enqueued
from thrifty.space import Amount, Space, TimeUnit
from thrifty.store import (
    FrameBackend,
    Lease,
    Store,
    StudyInfo,
    TrialLine,
    frame,
    nondominated,
    redact_url,
)

from ._asking import AskingMixin
from ._extension import ExtensionMixin, extension_of, requests_for_longer
from ._forecast import (
    Forecast,
    forecast,
    forest_of,
    mean_epoch_s,
    memory_forecast,
    trained_forecast,
)
from ._goals import Bound, EpochSizes, Goals, Mode, is_better_smaller, unit_of
from ._identity import Recipe
from ._ledger import Ledger
from ._loop import Observer, StopWhen
from ._plot_mixin import PlotMixin
from ._preflight import (
    check_arguments,
    check_horizons,
    check_max_epochs,
    check_run,
    check_study,
    checked_name,
    checked_seed,
    checked_seeds,
    prior_trials,
    refusal,
)
from ._reader import Reader, Trials, is_in_memory, overview
from ._repository import Source, Storage, StudyRepository
from ._results import Savings, TrialResult, candidates, certainty_of, rows, savings, trial_result
from ._session import (
    RunOptions,
    Session,
    defining_file,
    file_of,
    say,
    say_if_all_failed,
    say_what_was_not_checked,
    say_where_from,
)
from ._steering_mixin import SteeringMixin
from .simulation._simulate import simulate
from .simulation._simulation_report import Simulation


if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import torch


logger = plain_logger(__name__)

_ELSEWHERE = {
    "best_value": "study.best_trial.value",
    "best_params": "study.best_trial.config",
    "best_config": "study.best_trial.config",
    "best_model": "study.best_trial.load_model()",
    "direction": "study.mode",
    "directions": "study.goals.modes",
    "optimize": "study.run()",
}
"""What other libraries call an attribute of a study, and what to write here."""

_STUDY_ARGUMENTS = {
    "direction": 'mode="min" or mode="max"',
    "directions": 'mode=["min", "max"], one for each metric,',
    "study_name": "name=",
    "sampler": "algorithm=th.RandomSearch(max_epochs=..., num_trials=..., sampler=...)",
    "pruner": "an algorithm that stops trials, such as algorithm=th.ASHA(...),",
    "scheduler": "algorithm=th.ASHA(...) or another algorithm",
    "search_space": "space=",
    "param_space": "space=",
    "n_trials": "algorithm=th.RandomSearch(max_epochs=..., num_trials=...)",
    "num_trials": "algorithm=th.RandomSearch(max_epochs=..., num_trials=...)",
    "max_epochs": "algorithm=th.Hyperband(max_epochs=...) or another algorithm",
    "executor": "study.run(executor=...)",
    "workers": "study.run(executor=th.Local(workers=...))",
    "num_workers": "study.run(executor=th.Local(workers=...))",
}
"""What other libraries call an argument of ``Study``, and what to write."""

_RUN_ARGUMENTS = {
    "workers": "executor=th.Local(workers=...)",
    "num_workers": "executor=th.Local(workers=...)",
    "n_jobs": "executor=th.Local(workers=...)",
    "devices": "executor=th.Local(devices=...)",
    "timeout": "stop=th.StopWhen(seconds=...)",
    "callbacks": "observers=[...]",
    "show_progress_bar": "progress=",
    "verbose": "progress=",
    "n_trials": "th.Study(algorithm=th.RandomSearch(..., num_trials=...))",
    "num_trials": "th.Study(algorithm=th.RandomSearch(..., num_trials=...))",
    "max_epochs": "th.Study(algorithm=th.Hyperband(max_epochs=...))",
}
"""What other libraries call an argument of ``Study.run``, and what to write."""


class Study(PlotMixin, SteeringMixin, ExtensionMixin, AskingMixin):
    """A study that tunes a task over a space, training every shared step once.

    Nothing is opened or trained before ``run``.

    Args:
        task: The task that one trial trains.
        space: The hyper-parameters. A function (``thrifty.trainable``) needs none: they are what it
            suggests, found when they are first needed.
        algorithm: What to try and for how long (``Hyperband``, ``ASHA``, ``GridSearch``, ...).
        metric: The metric of the task to optimise, or a list of them; algorithms compare trials by
            the first.
        mode: ``"max"`` or ``"min"``; a list of these for a list of metrics. None means ``"max"``;
            for a loss, pass ``mode="min"``.
        constraints: Limits on metrics: a number that must not be exceeded, or ``at_least(number)``.
            A trial that keeps them is better than any that does not. Among those that do not, the
            one with the smallest violation is the best.
        storage: A database address, or a ``Storage``, which also says where checkpoints go and how
            much they may take.
        name: The study's name in the database; an existing study of this name is resumed.
        seed: The seed of initialisation, data order, dropout and sampling, the same for all trials.
        seeds: The number of seeds that each configuration is trained with. The first is ``seed``,
            the others are derived from it. Algorithms see the means over the seeds, and rungs also
            keep trials that are not worse with 90 % probability.
        warm_start: Earlier studies that samplers learn from: names in the same database, or
            studies. Their trials are copied when this study is created.

    Raises:
        UsageError: An argument is invalid.

    >>> import thrifty as th
    >>> from thrifty.testing import LineTask
    >>> study = th.Study(
    ...     LineTask(),
    ...     th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
    ...     algorithm=th.GridSearch(max_epochs=4),
    ...     metric="mse",
    ...     mode="min",
    ...     storage="sqlite://",
    ...     name="line",
    ... )
    >>> _ = study.run(progress=False)
    >>> study.savings.trial_epochs, study.savings.unique_epochs
    (8, 6)
    """

    @with_advice(_STUDY_ARGUMENTS)
    def __init__(  # noqa: PLR0913 (one argument for each part of a study)
        self,
        task: Task | Trainable,
        space: Space | None = None,
        *,
        algorithm: Algorithm,
        metric: str | Sequence[str],
        mode: Mode | Sequence[Mode] | None = None,
        constraints: Mapping[str, Bound | float] | None = None,
        storage: Storage | str = "sqlite:///thrifty.db",
        name: str,
        seed: int = 0,
        seeds: int = 1,
        warm_start: str | Study | Sequence[str | Study] = (),
    ) -> None:
        check_arguments(task, space, algorithm=algorithm)
        self.task = task
        self.goals = Goals.of(metric, "max" if mode is None else mode, constraints=constraints)
        self._may_say_mode = mode is None
        """Whether a run or a plan may still warn that the metric is maximised by default."""
        self.storage = Storage.of(storage)
        self.name = checked_name(name)
        self.seed = checked_seed(seed)
        self.seeds = checked_seeds(seeds)
        self._space, self._algorithm = space, algorithm
        self._sizes = EpochSizes(task=task, space=space, seed=self.seed)
        if space is not None:
            check_horizons(algorithm, space)
            if not self._sizes.loads_data((*space.amounts(), *algorithm.amounts())):
                check_max_epochs(self.algorithm)
        self.file: Path | None = None
        """The file that defines the study, for resuming by name; the command line sets it."""
        self._earlier = _studies(warm_start)
        self._enqueued: list[Mapping[str, Any]] = []
        """All configurations enqueued through this object, stored or not."""
        self._clock: Clock = SystemClock()
        self._reader = Reader()
        self._auto: Mapping[str, str] | None = None
        """What ``Auto`` has chosen in a run of this object."""

    def __repr__(self) -> str:
        algorithm = self._algorithm if self._space is None else self.algorithm
        return f"Study({self.name!r}, {algorithm!r}, storage={redact_url(self.storage.url)!r})"

    if not TYPE_CHECKING:  # else the type checker would not report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for names of other libraries, it says what to write."""
            if name in _ELSEWHERE:
                message = f"a Study has no attribute {name!r}; use {_ELSEWHERE[name]}"
                raise AttributeError(message, name=name)
            # This raises the error of a property again, which would be lost otherwise.
            return object.__getattribute__(self, name)

    def _repr_html_(self) -> str:
        """Return an overview for notebooks; it reads the database and creates nothing."""
        repository = self._repository()
        return overview(repository, self._reader, result=self._result)

    @property
    def space(self) -> Space:
        """The hyper-parameters; all times of schedules are in epochs."""
        return self._in_epochs[0]

    @property
    def algorithm(self) -> Algorithm:
        """The search algorithm; all of its options are in epochs.

        With ``Auto``, it is the algorithm chosen once ``run`` has begun.
        """
        return self._in_epochs[1]

    @property
    def unit(self) -> TimeUnit:
        """The unit in which the study shows what it trains: that of its horizon."""
        return self._in_epochs[2]

    @cached_property
    def _given(self) -> tuple[Space, Algorithm]:
        """Space and algorithm as they were given; a function's space is looked for only here.

        A process that loads the file of a study makes the study, too, and must not look for it.
        """
        space = self._space
        if space is None:
            assert isinstance(self.task, SelfDescribing)
            space = self.task.space()
        return space, self._algorithm

    @cached_property
    def _in_epochs(self) -> tuple[Space, Algorithm, TimeUnit]:
        """Space and algorithm with all amounts in epochs, and the unit of the horizon."""
        space, algorithm = self._given
        size = self._sizes.of((*space.amounts(), *algorithm.amounts()))
        out = algorithm.in_epochs(size)
        check_max_epochs(out)
        return space.in_epochs(size), out, unit_of(algorithm, space, size)

    @property
    def metric(self) -> str:
        """The metric to optimise; the first one if there are several."""
        return self.goals.metrics[0]

    @property
    def mode(self) -> Mode:
        """Whether to maximise or minimise the first metric."""
        return self.goals.modes[0]

    def _check_mode(self) -> None:
        """Log a warning, once, if a metric that looks like a loss is maximised by default."""
        if self._may_say_mode and is_better_smaller(self.metric):
            logger.warning(
                "study %r maximises %r, because mode was not given, but its name says that "
                'smaller is better; pass mode="min" to minimise it (or mode="max" to keep this)',
                self.name,
                self.metric,
            )
        self._may_say_mode = False

    # -- before a run -----------------------------------------------------------------

    def plan(self, *, memory: bool | None = None) -> Forecast:
        """Return how much there is to train, with and without sharing; train nothing.

        What an algorithm decides by results is estimated; see ``Forecast``. A longer ``max_epochs``
        that was requested of the study counts, because the next ``run`` trains it.

        Args:
            memory: Whether to forecast the memory of trials, too. None: if the task makes its model
                without values, as ``th.FineTune`` does. True makes some real models for tasks that
                cannot, and reads a batch of the data.

        Raises:
            UsageError: Space, task, algorithm and metric do not fit together.
            StudyNotFoundError: A study given in ``warm_start`` does not exist.
            StudyMismatchError: The database has a different study of this name.
        """
        self._check_mode()
        self.space.check(max_epochs=self.algorithm.max_epochs)
        longer = self._as_requested()
        if longer is not self:
            return longer.plan(memory=memory)
        repository = self._repository()
        planned = repository.planned()
        enqueued, priors = repository.foreseen(self._enqueued, self._sources())
        finished = self._finished(repository)
        if finished is not None:
            done = trained_forecast(
                finished, forest=forest_of(finished), epoch_seconds=mean_epoch_s(finished)
            )
            return replace(done, choice=planned.choice)
        found = forecast(
            planned.algorithm,
            self.space,
            goals=self.goals,
            seed=self.seed,
            num_seeds=self.seeds,
            epoch_seconds=self._epoch_seconds(),
            enqueued=enqueued,
            prior=prior_trials(priors, self.goals),
            known=repository.known(),
            unit=self.unit,
        )
        found = replace(found, choice=planned.choice)
        if memory is False:
            return found
        needed = memory_forecast(
            self.task,
            self.space,
            max_epochs=self.algorithm.max_epochs,
            seed=self.seed,
            real=bool(memory),
        )
        return replace(found, memory=needed)

    def simulate(
        self,
        *,
        workers: int,
        epoch_s: EpochSeconds | None = None,
        faults: Faults | None = None,
        share: bool = True,
    ) -> Simulation:
        """Simulate the study on made-up workers and results; train nothing.

        The simulation says how long the study takes and how much it trains.

        Args:
            workers: The number of workers, each training one trial at a time.
            epoch_s: Seconds of an epoch, or a function of the hyper-parameters' values in that
                epoch (None: as measured by earlier runs of this study).
            faults: Failures, stragglers and preemptions.
            share: Whether equal prefixes are trained once. If False, each trial trains all of its
                epochs itself. See ``simulate`` for more.

        Raises:
            UsageError: No epoch was timed yet and ``epoch_s`` is not given; see also ``simulate``.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(
        ...     LineTask(),
        ...     th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
        ...     metric="mse",
        ...     mode="min",
        ...     algorithm=th.GridSearch(max_epochs=4),
        ...     name="line",
        ...     storage="sqlite://",
        ... )
        >>> study.simulate(workers=2, epoch_s=60.0).end_to_end_s
        240.0
        """
        measured_s = self._epoch_seconds() if epoch_s is None else epoch_s
        if measured_s is None:
            raise UsageError(
                f"no epoch of study {self.name!r} has been timed yet: give simulate(epoch_s=...), "
                "or run it for a while"
            )
        return simulate(
            self._repository().planned(num_workers=workers).algorithm,
            self.space,
            metric=self.metric,
            mode=self.mode,
            workers=workers,
            epoch_s=measured_s,
            faults=faults,
            share=share,
            seed=self.seed,
            seeds=self.seeds,
        )

    def only(
        self,
        configs: Sequence[Mapping[str, Any]],
        *,
        epochs: int | Amount | None = None,
        name: str | None = None,
    ) -> Study:
        """Return a study of the same task that trains some configurations, and nothing else.

        It is in the same search plan, so what this study or any other one of its task has trained
        is not trained again. Its ``plan`` says what is left to train, its ``run`` trains it. Called
        again with other configurations, it is the same study with more trials.

        Args:
            configs: The configurations, with a value for each hyper-parameter that varies.
            epochs: How many of their first epochs are trained (default: all). Schedules stay those
                of the whole training, so that a later call can go on from there.
            name: Name of the new study (default: ``"NAME-only-EPOCHS"``).

        Raises:
            SpaceError: A configuration is not in the space, or lacks a hyper-parameter.
            AlgorithmError: ``epochs`` is more than the study's ``max_epochs``.

        >>> import thrifty as th
        >>> from thrifty.testing import LineTask
        >>> study = th.Study(
        ...     LineTask(),
        ...     th.Space(lr=th.Float(0.01, 0.1)),
        ...     metric="mse",
        ...     mode="min",
        ...     name="line",
        ...     algorithm=th.Hyperband(max_epochs=9),
        ...     storage="sqlite://",
        ... )
        >>> study.only([{"lr": 0.05}, {"lr": 0.02}], epochs=3).plan().epochs_to_train
        6
        """
        if isinstance(configs, str | Mapping) or not isinstance(configs, Sequence):
            raise UsageError(f"configs is {configs!r}; give a list of configurations")
        space, _ = self._given
        whole, unit = self.algorithm.max_epochs, self.unit
        length = self._first_epochs(epochs)
        horizon: Any = whole if unit.is_epochs else unit.amount(whole)
        metrics, modes = self.goals.metrics, self.goals.modes
        several = len(metrics) > 1
        made = Study(
            self.task,
            space,
            algorithm=Enqueued(max_epochs=horizon, epochs=None if length == whole else length),
            metric=metrics if several else metrics[0],
            mode=modes if several else modes[0],
            constraints=dict(self.goals.constraints),
            storage=self.storage,
            name=f"{self.name}-only-{length}" if name is None else name,
            seed=self.seed,
            seeds=self.seeds,
        )
        made.file = self.file
        # Only a run stores them, because a plan must not leave trials behind.
        made._enqueued = [self._whole(config) for config in configs]
        return made

    # -- the run ----------------------------------------------------------------------

    @with_advice(_RUN_ARGUMENTS)
    def run(
        self,
        *,
        executor: ExecutorConfig | None = None,
        stop: StopWhen | None = None,
        progress: bool = True,
        observers: Sequence[Observer] = (),
    ) -> Study:
        """Train until the algorithm is done, or resume a stopped study; return the study itself.

        Ctrl-C stops it cleanly: workers keep their state at the end of the epoch, and a later
        ``run`` goes on from there (a second Ctrl-C stops at once). ``stop`` does the same after a
        number of epochs, after some time or at a target. A study that is done already is only read,
        unless configurations were enqueued since, or its algorithm has more trials or a larger
        ``max_epochs`` now: then its trials go on from where they have ended (see ``extend``). A
        longer ``max_epochs`` that was requested of the study, from the dashboard or while it ran,
        is applied at the beginning, and again when all trials are trained.

        A trial that fails does not end the study. The log names the first trial with each error at
        once, and all of them at the end. If every trial failed, it says so and what to do.

        Raises:
            UsageError: An argument is invalid (raised before any training).
            StudyMismatchError: The database has a different study of this name.
            StudyNotFoundError: A study given in ``warm_start`` does not exist.
            StoreBusyError: Another process runs this study, or (unless the storage is shared)
                another study of this task and seed.
            StoreUnreachableError: The server of the database has not answered for minutes.
            StoreWriteError: The disk is full, or the location is read-only.
        """
        check_run(executor, stop, observers)
        if self._may_only_read():
            return self
        check_trains(self.task, executor)
        self._check_mode()
        if stop is not None:
            stop = stop.in_epochs(self._sizes.of(stop.amounts()))
        repository = self._repository()
        with repository.open() as store:
            info = repository.find(store)
            if info is not None:
                info = repository.at_home(store, info, file=self.file or file_of(self))
                repository.enqueue(store, info, self._enqueued)
                if self._is_finished(repository, store, info, progress=progress):
                    return self
            with repository.recipe.watched(fresh=info is None):
                report, dry_run_error = check_study(
                    self.task,
                    self.space,
                    algorithm=self.algorithm,
                    goals=self.goals,
                    seed=self.seed,
                    devices=(executor or Local()).local_devices,
                )
                if report is None or not report.pure:
                    repository = repository.joined()
                info = repository.find(store) or repository.make(
                    store,
                    plan=repository.open_plan(store).id,
                    file=self._file(),
                    enqueued=self._enqueued,
                    sources=self._sources(),
                    num_workers=(executor or Local()).num_workers,
                )
                repository = self._with_choice(repository, info, progress=progress)
                with store.lease(info, shared=self.storage.is_shared) as lease:
                    self._train(
                        repository,
                        store,
                        info,
                        lease=lease,
                        options=RunOptions(
                            executor=executor or Local(),
                            stop=stop,
                            progress=progress,
                            observers=observers,
                            began=self._clock.monotonic(),
                        ),
                        dry_run_error=dry_run_error,
                    )
        return self

    def _is_finished(
        self, repository: StudyRepository, store: Store, info: StudyInfo, *, progress: bool
    ) -> bool:
        """Return whether nothing is left to train, and say so."""
        finished = self._reader.finished(repository, store, info)
        if finished is None or requests_for_longer(store, info):
            return False
        say_where_from(repository, finished, store=store, progress=progress, finished=True)
        say_if_all_failed(repository, finished)
        return True

    def _train(
        self,
        repository: StudyRepository,
        store: Store,
        info: StudyInfo,
        *,
        lease: Lease,
        options: RunOptions,
        dry_run_error: str,
    ) -> None:
        """Train what is left, and continue while a longer ``max_epochs`` is requested.

        Args:
            repository: The study's records.
            store: The open database.
            info: The stored study.
            lease: The lease on the study.
            options: What the run is asked for.
            dry_run_error: Why the task's dry run has failed; "" if it has not.
        """
        before = info.spec["max_epochs"]
        info = repository.extend(store, info)
        repository, info = self._lengthened(repository, store, info)
        is_done = False
        while not is_done:
            with self._reader.running(repository, store, info) as ledger:
                if before < (after := info.spec["max_epochs"]):
                    found = extension_of(ledger, before=before, after=after)
                    text = str(found).replace("\n", "; ")
                    logger.info("study %r: %s", self.name, text)
                session = Session(repository, ledger, store=store, lease=lease, options=options)
                is_trained = session.train()
                say_what_was_not_checked(repository, ledger, error=dry_run_error)
            before = info.spec["max_epochs"]
            # A loop that asks has been told already that the study is done.
            if is_trained and not isinstance(options.executor, AskTell):
                repository, info = self._lengthened(repository, store, info)
            is_done = info.spec["max_epochs"] == before

    # -- results ----------------------------------------------------------------------

    @property
    def trials(self) -> list[TrialResult]:
        """All trials so far, in order; a notebook shows the best ones as a table."""
        ledger = self._current_ledger()
        found = (self._result(ledger, number) for number in range(len(ledger.history)))
        return Trials(found, goals=self.goals)

    @property
    def best_trial(self) -> TrialResult:
        """The trial whose metric is best at the epoch that it has reached.

        Trials that are not finished count: many algorithms train few trials to the end. Failed
        trials and those that break a constraint do not. Of equally good trials, the first is the
        best. ``load_model()`` returns the model at that epoch.

        With several seeds, ``certainty`` is the probability that this trial has the best true mean
        of all these trials, and ``interval`` is a confidence interval of its mean.

        Raises:
            ThriftyError: No trial has reported yet, all have failed (with their errors), or none is
                feasible.
            UsageError: There are several objectives.
        """
        if len(self.goals.metrics) > 1:
            raise UsageError(
                f"study {self.name!r} has {len(self.goals.metrics)} objectives "
                f"({', '.join(self.goals.metrics)}); use `best_trials`, its Pareto front"
            )
        ledger = self._current_ledger()
        found = candidates(ledger, name=self.name)
        best = max(found, key=lambda t: (t.objectives[0], -t.number))
        several = self.seeds > 1
        certainty = certainty_of(ledger, best.number, seed=self.seed) if several else None
        return self._result(ledger, best.number, certainty=certainty)

    @property
    def best_trials(self) -> list[TrialResult]:
        """The Pareto front: feasible trials that no other trial dominates so far.

        A trial dominates another if it is not worse in any objective and better in one. Trials that
        are equal in all objectives are all included. With one objective, these are all trials that
        are as good as the best.

        Raises:
            ThriftyError: No trial has reported yet, all have failed (with their errors), or none is
                feasible.
        """
        ledger = self._current_ledger()
        found = candidates(ledger, name=self.name)
        front = nondominated([trial.objectives for trial in found])
        best = (self._result(ledger, found[index].number) for index in front)
        return Trials(best, goals=self.goals, source="best_trials")

    def open_artifact(self, trial: TrialResult | int, name: str) -> IO[bytes]:
        """Open a file that a trial has logged with ``trial.log_artifact``, for reading bytes.

        Its content is compared with its digest first.

        Args:
            trial: The trial, or its number.
            name: The name of the file; ``TrialResult.artifacts`` has them.

        Raises:
            UsageError: There is no such trial, it has no such artifact, or the study is in memory.
            CheckpointError: The file was not stored, or is missing or damaged.
        """
        number = trial.number if isinstance(trial, TrialResult) else trial
        ledger, repository = self._current_ledger(), self._repository()
        if is_in_memory(repository):
            raise UsageError(
                "a study in memory leaves its artifacts in a temporary folder; give the study a "
                "database, such as storage='sqlite:///study.db'"
            )
        return repository.open_artifact(ledger, number, name)

    def log_lines(self, trial: TrialResult | int) -> list[TrialLine]:
        """Return the lines that user code has logged while a trial trained, in order.

        They are messages of ``logging`` at the levels that your code enables, the last ones of
        each epoch (``Storage(log_bytes=)`` says how many). A line that was logged in a shared epoch
        is a line of all trials that share it; one of a fused pack, of all trials in the pack. With
        several seeds, the lines are those of the first.

        Args:
            trial: The trial, or its number.

        Raises:
            UsageError: There is no such trial, or the study is in memory.
        """
        number = trial.number if isinstance(trial, TrialResult) else trial
        ledger, repository = self._current_ledger(), self._repository()
        if is_in_memory(repository):
            raise UsageError(
                "a study in memory keeps no log lines; give the study a database, such as "
                "storage='sqlite:///study.db'"
            )
        return list(repository.log_lines(ledger, number))

    @property
    def savings(self) -> Savings:
        """What was saved so far."""
        return savings(self._current_ledger())

    def forest(self) -> list[ForestStage]:
        """Return the current stage forest."""
        return forest_of(self._current_ledger())

    @overload
    def trials_dataframe(self, *, backend: Literal["pandas"] = "pandas") -> pd.DataFrame: ...

    @overload
    def trials_dataframe(self, *, backend: Literal["polars"]) -> pl.DataFrame: ...

    def trials_dataframe(self, *, backend: FrameBackend = "pandas") -> pd.DataFrame | pl.DataFrame:
        """Return a data frame with one row per trial.

        The columns are number, state, epochs, value, error, and each hyper-parameter
        (``params_lr``). Several objectives have a column each (``values_accuracy``), and so has
        each other metric of the task (``metrics_loss``). With constraints there is also the
        violation.

        Raises:
            MissingExtraError: pandas or polars is not installed.
            UsageError: ``backend`` is neither pandas nor polars.
        """
        return frame(rows(self.trials, self.goals), backend=backend)  # type: ignore[no-any-return]

    # -- internals --------------------------------------------------------------------

    def _repository(self) -> StudyRepository:
        recipe = Recipe(
            task=self.task,
            space=self.space,
            algorithm=self.algorithm,
            goals=self.goals,
            seed=self.seed,
            num_seeds=self.seeds,
            unit=self.unit,
            auto=self._auto,
            warm_start=tuple(s if isinstance(s, str) else s.name for s in self._earlier),
        )
        return StudyRepository(
            recipe=recipe, storage=self.storage, name=self.name, clock=self._clock
        )

    def _with_choice(
        self, repository: StudyRepository, info: StudyInfo, *, progress: bool
    ) -> StudyRepository:
        """Return the repository with the algorithm that the stored study has, and say it."""
        recipe = repository.recipe.chosen_as(info.spec)
        if recipe is repository.recipe:
            return repository
        say(self.name, recipe.choice, progress=progress)
        space, _, unit = self._in_epochs
        self._in_epochs, self._auto = (space, recipe.algorithm, unit), recipe.auto
        return replace(repository, recipe=recipe)

    def _finished(self, repository: StudyRepository) -> Ledger | None:
        """Return the ledger if the study exists and has nothing left to try, else None."""
        with contextlib.suppress(StudyNotFoundError), repository.open(create=False) as store:
            info = repository.find(store)
            if info is not None and not repository.not_enqueued(store, info, self._enqueued):
                return self._reader.finished(repository, store, info)
        return None

    def _may_only_read(self) -> bool:
        """Return whether nothing may train now, as while a command loads the study's file.

        Raises:
            UsageError: So it is, and the study has something left to train.
        """
        why = refusal()
        # A run of a study that is done only reads it, which is no harm.
        if why and self._finished(self._repository()) is None:
            raise UsageError(why)
        return bool(why)

    def _sources(self) -> list[Source]:
        return [
            s if isinstance(s, str) else (s._repository(), s._current_ledger())
            for s in self._earlier
        ]

    def _file(self) -> str | None:
        path = self.file or defining_file(self, task=self.task)
        return None if path is None else str(Path(path).resolve())

    def _current_ledger(self) -> Ledger:
        """Return the current ledger, from the run in this process or from the database."""
        return self._reader.current(self._repository())

    def _epoch_seconds(self) -> float | None:
        """Return the mean time of an epoch of this task, or None if no epoch was timed."""
        try:
            found = mean_epoch_s(self._current_ledger())
        except ThriftyError:
            found = None
        return self._repository().mean_epoch_s() if found is None else found

    def _result(
        self, ledger: Ledger, number: int, *, certainty: float | None = None
    ) -> TrialResult:
        return trial_result(
            ledger, number, load=partial(self._load_model, ledger, number), certainty=certainty
        )

    def _load_model(
        self, ledger: Ledger, number: int, *, replica: int, average: str | None
    ) -> torch.nn.Module:
        return self._repository().load_model(ledger, number, replica=replica, average=average)


def _studies(given: object) -> tuple[str | Study, ...]:
    studies = (given,) if isinstance(given, str | Study) else given
    if not isinstance(studies, Sequence) or not all(isinstance(s, str | Study) for s in studies):
        raise UsageError(
            f"warm_start is {given!r}; give the name of an earlier study, the study, or a list of "
            "these"
        )
    return tuple(studies)
