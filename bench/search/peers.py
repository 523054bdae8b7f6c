"""Optuna, Syne Tune and SMAC3, driven through their own ask-and-tell in the same simulator.

Each has the options that its documentation shows, and one job's epochs cost what they cost ours.
Syne Tune and SMAC3 are not among the bench's requirements, because they bring hundreds of megabytes
that the peers here do not need: see ``syne_tune_peers`` and ``smac_peer`` for how to install them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.search.curves import MAX_EPOCHS, Task
from bench.search.simulator import Job, Searcher
from bench.search.smac_peer import Smac
from bench.search.syne_tune_peers import SyneTune


class Peer(NamedTuple):
    """A row of the table; ``make(task, seed)`` returns its searcher.

    ``slow``: a study takes ten seconds or more, so that it gets fewer tasks.
    """

    name: str
    make: Callable[[Task, int], Searcher]
    slow: bool = False


class _Optuna:
    """Searcher that trains each trial epoch by epoch until Optuna prunes it."""

    def __init__(self, task: Task, sampler: Any, pruner: Any) -> None:
        import optuna  # noqa: PLC0415 - an optional peer

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._task = task
        self._rows: list[int] = []
        self._going_on: deque[Job] = deque()
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._trials: list[Any] = []

    def ask(self, num: int) -> Sequence[Job]:
        jobs = [self._going_on.popleft() for _ in range(min(num, len(self._going_on)))]
        while len(jobs) < num:
            number = len(self._rows)
            self._rows += self._task.nearest([self._start()])
            jobs.append(Job(number, self._rows[number], 0, 1))
        return jobs

    def tell(self, job: Job) -> None:
        score = self._task.curves[job.row][job.stop - 1]
        if score == -math.inf:
            self._study.tell(self._trials[job.trial], state=self._states.FAIL)
        elif self._goes_on(job.trial, score, job.stop):
            self._going_on.append(Job(job.trial, job.row, job.stop, job.stop + 1))

    def _start(self) -> Mapping[str, Any]:
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


def peers() -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that are installed, and why the others are missing."""
    found: list[Peer] = []
    missing: dict[str, str] = {}
    makers = {"Optuna": _optuna_peers, "Syne Tune": _syne_tune_peers, "SMAC3": _smac_peers}
    for library, make in makers.items():
        try:
            found += make()
        except ImportError as error:
            missing[library] = str(error)
    return found, missing


def _optuna_peers() -> list[Peer]:
    from optuna import pruners, samplers  # noqa: PLC0415

    def hyperband(task: Task, seed: int) -> Searcher:
        pruner = pruners.HyperbandPruner(
            min_resource=1, max_resource=MAX_EPOCHS, reduction_factor=3
        )
        return _Optuna(task, samplers.TPESampler(seed=seed % 2**32), pruner)

    def halving(task: Task, seed: int) -> Searcher:
        pruner = pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        return _Optuna(task, samplers.TPESampler(seed=seed % 2**32), pruner)

    def process(task: Task, seed: int) -> Searcher:
        # The median is the pruner of a study that names none.
        return _Optuna(
            task, sampler=samplers.GPSampler(seed=seed % 2**32), pruner=pruners.MedianPruner()
        )

    return [
        Peer("Optuna TPE + Hyperband", hyperband),
        Peer("Optuna TPE + halving", halving),
        Peer("Optuna GP", process, slow=True),
    ]


def _syne_tune_peers() -> list[Peer]:
    import syne_tune.optimizer.baselines as names  # noqa: PLC0415 - checks that it is installed

    def peer(name: str, method: str, *, slow: bool = False, **options: Any) -> Peer:
        def make(task: Task, seed: int) -> Searcher:
            return SyneTune(task, method=method, seed=seed, **options)

        return Peer(f"Syne Tune {name}", make, slow)

    if not hasattr(names, "DyHPO"):
        raise ImportError("this version of Syne Tune has no DyHPO and no MOBSTER; 0.13.0 has them")
    return [
        peer("ASHA", "ASHA"),
        peer("Hyperband", "ASHA", brackets=4),
        peer("MOBSTER", "MOBSTER", slow=True),
        peer("DyHPO", "DyHPO", slow=True),
    ]


def _smac_peers() -> list[Peer]:
    import smac.intensifier.hyperband  # noqa: F401, PLC0415 - checks that it is installed

    return [Peer("SMAC3 Hyperband", lambda task, seed: Smac(task, seed=seed), slow=True)]
