"""Syne Tune's ASHA, MOBSTER and DyHPO, driven as its tuner does.

ASHA and MOBSTER stop trials; DyHPO pauses them and resumes them. Version 0.13.0 has them all:
``pip install --no-deps syne-tune==0.13.0 dill autograd``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from bench.search.curves import MAX_EPOCHS, Task
from bench.search.simulator import Job


class SyneTune:
    """Searcher that trains each trial epoch by epoch until the scheduler says stop or pause."""

    def __init__(self, task: Task, *, method: str, seed: int, **options: Any) -> None:
        import syne_tune.optimizer.baselines as names  # noqa: PLC0415 - an optional peer
        from syne_tune.backend.trial_status import Trial  # noqa: PLC0415

        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        logging.getLogger().setLevel(logging.ERROR)  # its schedulers log to the root
        np.random.seed(seed % 2**32)  # noqa: NPY002 - for draws from numpy's global stream
        self._task = task
        self._make_trial = Trial
        if method != "ASHA":
            options["search_options"] = {"debug_log": False}
        self._scheduler = getattr(names, method)(
            {**_space(task), "epochs": MAX_EPOCHS},
            metric="score",
            mode="max",
            resource_attr="epoch",
            max_resource_attr="epochs",
            random_seed=seed % 2**31,
            **options,
        )
        self._trials: list[Any] = []
        self._rows: list[int] = []
        self._reached: list[int] = []
        self._going_on: deque[Job] = deque()

    def ask(self, num: int) -> Sequence[Job]:
        jobs = [self._going_on.popleft() for _ in range(min(num, len(self._going_on)))]
        while len(jobs) < num:
            suggestion = self._scheduler.suggest(len(self._trials))
            if suggestion is None:
                break
            if suggestion.spawn_new_trial_id:
                jobs.append(self._start(suggestion.config))
            else:
                jobs.append(self._next_job(suggestion.checkpoint_trial_id))
        return jobs

    def tell(self, job: Job) -> None:
        score, trial = self._task.curves[job.row][job.stop - 1], self._trials[job.trial]
        self._reached[job.trial] = job.stop
        if score == -math.inf:
            self._scheduler.on_trial_error(trial)
            return
        result = {"score": score, "epoch": job.stop}
        if job.stop == MAX_EPOCHS:
            self._scheduler.on_trial_complete(trial, result)
        elif self._scheduler.on_trial_result(trial, result) == "CONTINUE":
            self._going_on.append(self._next_job(job.trial))
        else:
            self._scheduler.on_trial_remove(trial)

    def _start(self, config: dict[str, Any]) -> Job:
        trial = self._make_trial(len(self._trials), config, datetime(2026, 1, 1))
        self._trials.append(trial)
        self._rows += self._task.nearest([config])
        self._reached.append(0)
        self._scheduler.on_trial_add(trial)
        return self._next_job(trial.trial_id)

    def _next_job(self, number: int) -> Job:
        return Job(number, self._rows[number], self._reached[number], self._reached[number] + 1)


def _space(task: Task) -> dict[str, Any]:
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
