"""SMAC3's multi-fidelity facade: Hyperband with a random forest, by its own ask-and-tell.

SMAC3 knows no checkpoints. Here a configuration that it promotes goes on from the epochs that it
already has, which is to its advantage. ``pip install smac==2.4.1``, where ``swig`` is installed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.search.curves import MAX_EPOCHS, Task
from bench.search.simulator import Job


class Smac:
    """Searcher that trains what SMAC3 asks for, up to the budget that it names."""

    def __init__(self, task: Task, *, seed: int) -> None:
        from smac import MultiFidelityFacade, Scenario  # noqa: PLC0415 - an optional peer
        from smac.runhistory import StatusType, TrialValue  # noqa: PLC0415

        self._task = task
        self._make_value, self._status = TrialValue, StatusType
        self._folder = tempfile.TemporaryDirectory(prefix="thrifty-smac-")
        scenario = Scenario(
            _space(task, seed),
            deterministic=True,
            n_trials=1_000_000,
            min_budget=1,
            max_budget=MAX_EPOCHS,
            seed=seed % 2**31,
            output_directory=self._folder.name,
        )
        self._smac = MultiFidelityFacade(
            scenario, _never_called, overwrite=True, logging_level=False
        )
        self._numbers: dict[Any, int] = {}
        self._rows: list[int] = []
        self._reached: list[int] = []
        self._asked: dict[tuple[int, int], Any] = {}
        self._worst = 0.0

    def ask(self, num: int) -> Sequence[Job]:
        return [self._next_job() for _ in range(num)]

    def tell(self, job: Job) -> None:
        info = self._asked.pop((job.trial, job.stop))
        self._reached[job.trial] = job.stop
        score = self._task.curves[job.row][job.stop - 1]
        if score == -math.inf:
            value = self._make_value(cost=self._worst, status=self._status.CRASHED)
        else:
            self._worst = max(self._worst, -score)
            value = self._make_value(cost=-score)
        self._smac.tell(info, value, save=False)

    def _next_job(self) -> Job:
        info = self._smac.ask()
        number = self._numbers.setdefault(info.config, len(self._rows))
        if number == len(self._rows):
            self._rows += self._task.nearest([dict(info.config)])
            self._reached.append(0)
        stop = round(info.budget)
        self._asked[number, stop] = info
        return Job(number, self._rows[number], self._reached[number], stop)


def _never_called(config: Any, seed: int, budget: float) -> float:
    raise AssertionError((config, seed, budget))


def _space(task: Task, seed: int) -> Any:
    from ConfigSpace import ConfigurationSpace, Float, Integer  # noqa: PLC0415

    space = ConfigurationSpace(seed=seed % 2**31)
    for axis in task.axes:
        if axis.whole:
            space.add(Integer(axis.name, (int(axis.low), int(axis.high)), log=axis.log))
        else:
            space.add(Float(axis.name, (axis.low, axis.high), log=axis.log))
    return space
