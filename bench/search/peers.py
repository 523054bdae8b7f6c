"""Optuna and Syne Tune, driven through their own ask-and-tell in the same simulator.

Both stop trials, and neither resumes any. Syne Tune is not among the bench's requirements, because
it would bring hundreds of megabytes that its ASHA does not need: ``pip install --no-deps
syne-tune==0.16.0 dill``.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from bench.search.curves import MAX_EPOCHS, Task
from bench.search.simulator import Job, Searcher


class Peer(NamedTuple):
    """A row of the table; ``make(task, seed)`` returns its searcher."""

    name: str
    make: Callable[[Task, int], Searcher]


class _EpochByEpoch(ABC):
    """Searcher that trains each trial epoch by epoch until the library says stop."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows: list[int] = []
        self._going_on: deque[Job] = deque()

    def ask(self, num: int) -> Sequence[Job]:
        jobs = [self._going_on.popleft() for _ in range(min(num, len(self._going_on)))]
        while len(jobs) < num:
            number = len(self._rows)
            config = self._start(number)
            self._rows += self._task.nearest([config])
            jobs.append(Job(number, self._rows[number], 0, 1))
        return jobs

    def tell(self, job: Job) -> None:
        score = self._task.curves[job.row][job.stop - 1]
        if score == -math.inf:
            self._fail(job.trial)
        elif self._goes_on(job.trial, score, job.stop):
            self._going_on.append(Job(job.trial, job.row, job.stop, job.stop + 1))

    @abstractmethod
    def _start(self, number: int) -> Mapping[str, Any]:
        """Return the configuration of the next trial."""

    @abstractmethod
    def _goes_on(self, number: int, score: float, epoch: int) -> bool:
        """Return whether to train the trial on after this epoch."""

    @abstractmethod
    def _fail(self, number: int) -> None: ...


class _Optuna(_EpochByEpoch):
    def __init__(self, task: Task, *, seed: int, pruner: Any) -> None:
        import optuna  # noqa: PLC0415 - an optional peer

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().__init__(task)
        self._states = optuna.trial.TrialState
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32)
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._trials: list[Any] = []

    def _start(self, number: int) -> Mapping[str, Any]:
        trial = self._study.ask()
        self._trials.append(trial)
        return {
            axis.name: trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.log)
            if axis.whole
            else trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)
            for axis in self._task.axes
        }

    def _goes_on(self, number: int, score: float, epoch: int) -> bool:
        trial = self._trials[number]
        trial.report(score, epoch)
        if epoch == MAX_EPOCHS:
            self._study.tell(trial, score)
        elif trial.should_prune():
            self._study.tell(trial, state=self._states.PRUNED)
        else:
            return True
        return False

    def _fail(self, number: int) -> None:
        self._study.tell(self._trials[number], state=self._states.FAIL)


class _SyneTune(_EpochByEpoch):
    def __init__(self, task: Task, *, seed: int, brackets: int) -> None:
        from syne_tune.backend.trial_status import Trial  # noqa: PLC0415 - an optional peer
        from syne_tune.optimizer.baselines import ASHA  # noqa: PLC0415

        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        super().__init__(task)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - numpy's global stream draws its brackets
        self._make_trial = Trial
        self._scheduler = ASHA(
            _syne_tune_space(task),
            metric="score",
            time_attr="epoch",
            max_t=MAX_EPOCHS,
            do_minimize=False,
            random_seed=seed % 2**31,
            brackets=brackets,
        )
        self._trials: list[Any] = []

    def _start(self, number: int) -> Mapping[str, Any]:
        config = self._scheduler.suggest().config
        trial = self._make_trial(number, config, datetime(2026, 1, 1))
        self._trials.append(trial)
        self._scheduler.on_trial_add(trial)
        return config

    def _goes_on(self, number: int, score: float, epoch: int) -> bool:
        trial, result = self._trials[number], {"score": score, "epoch": epoch}
        if epoch == MAX_EPOCHS:
            self._scheduler.on_trial_complete(trial, result)
            return False
        decision = self._scheduler.on_trial_result(trial, result)
        if decision != "CONTINUE":
            self._scheduler.on_trial_remove(trial)
        return decision == "CONTINUE"

    def _fail(self, number: int) -> None:
        self._scheduler.on_trial_error(self._trials[number])


def _syne_tune_space(task: Task) -> dict[str, Any]:
    from syne_tune import config_space as cs  # noqa: PLC0415

    makers = {
        (False, False): cs.uniform,
        (False, True): cs.loguniform,
        (True, False): cs.randint,
        (True, True): cs.lograndint,
    }
    kinds = {True: int, False: float}
    return {
        axis.name: makers[axis.whole, axis.log](
            kinds[axis.whole](axis.low), kinds[axis.whole](axis.high)
        )
        for axis in task.axes
    }


def peers() -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that are installed, and why the others are missing."""
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for library, make in (("Optuna", _optuna_peers), ("Syne Tune", _syne_tune_peers)):
        try:
            found += make()
        except ImportError as error:
            missing[library] = str(error)
    return found, missing


def _optuna_peers() -> list[Peer]:
    from optuna.pruners import HyperbandPruner, SuccessiveHalvingPruner  # noqa: PLC0415

    def hyperband(task: Task, seed: int) -> Searcher:
        pruner = HyperbandPruner(min_resource=1, max_resource=MAX_EPOCHS, reduction_factor=3)
        return _Optuna(task, seed=seed, pruner=pruner)

    def halving(task: Task, seed: int) -> Searcher:
        pruner = SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        return _Optuna(task, seed=seed, pruner=pruner)

    return [Peer("Optuna TPE + Hyperband", hyperband), Peer("Optuna TPE + halving", halving)]


def _syne_tune_peers() -> list[Peer]:
    import syne_tune.optimizer.baselines  # noqa: F401, PLC0415 - checks that it is installed

    return [
        Peer("Syne Tune ASHA", lambda task, seed: _SyneTune(task, seed=seed, brackets=1)),
        Peer("Syne Tune Hyperband", lambda task, seed: _SyneTune(task, seed=seed, brackets=4)),
    ]
