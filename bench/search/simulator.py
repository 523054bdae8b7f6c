"""A search with W workers on a table, in simulated time.

It records which worker trains what and when, and what was known at each moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np

from bench.search.curves import Task
from thrifty.core import derive_seed
from thrifty.search import Algorithm, History, Proposal, Stop, Trial


class Job(NamedTuple):
    """A job: train the trial from after epoch ``start`` to ``stop``.

    The trial is row ``row`` of the table.
    """

    trial: int
    row: int
    start: int
    stop: int


class Searcher(Protocol):
    """What the simulator drives: our algorithms, and peers."""

    def ask(self, num: int) -> Sequence[Job]:
        """Return what to train next, for ``num`` free workers.

        Nothing while jobs run means to wait for them.
        """

    def tell(self, job: Job) -> None:
        """Report that the job is done."""


@dataclass(frozen=True)
class Limit:
    """Limits of the simulation, which ends when both are used up.

    A free worker then takes no more jobs, and running jobs are lost.
    """

    seconds: float
    epochs: float = 0.0


class Found(NamedTuple):
    """The regret, from this moment on, of the row that one would have chosen."""

    seconds: float
    epochs: int
    regret: float


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated search.

    ``found`` has an entry for every change of the incumbent, which is the trial with the best score
    at the largest epoch that any trial has reached.
    """

    found: list[Found]
    busy_seconds: float
    epochs: int
    jobs: int

    def regret_at(self, *, seconds: float = np.inf, epochs: float = np.inf) -> float:
        """Return the regret of the incumbent then; 1 (the median row) before any result."""
        known = [f for f in self.found if f.seconds <= seconds and f.epochs <= epochs]
        return known[-1].regret if known else 1.0


class OurSearch:
    """One of thrifty's algorithms, asked as its loop does; where a study ends, a new one follows.

    A sampler that learns keeps what it has learnt, as with ``warm_start``.
    """

    def __init__(self, algorithm: Algorithm, task: Task, *, seed: int) -> None:
        self._algorithm = algorithm
        self._task = task
        self._rng = np.random.default_rng(seed)  # one stream: nothing is replayed here
        self._rows: list[int] = []
        self._history = History()
        sampler = getattr(algorithm, "sampler", None)
        self._learns = sampler is not None and sampler.adapts

    def ask(self, num: int) -> Sequence[Job]:
        """Return jobs as thrifty's loop does.

        It asks until there is something to train or nothing is decided.
        """
        while True:
            decisions = self._decide(num)
            if not decisions and not self._history.num_running:
                self._start_anew()
                decisions = self._decide(num)
                assert decisions, f"{self._algorithm} has nothing to say to an empty history"
            jobs = self._record(decisions)
            if jobs or not decisions:
                return jobs

    def _start_anew(self) -> None:
        prior = [*self._history.prior, *self._history] if self._learns else []
        self._history, self._rows = History(prior=[t for t in prior if _counts(t)]), []

    def tell(self, job: Job) -> None:
        curve = self._task.curves[job.row]
        if curve[job.stop - 1] == -np.inf:
            self._history.record_failure(job.trial)
        else:
            self._history.record_scores(job.trial, curve[: job.stop])

    def _decide(self, num: int) -> Sequence[Proposal | Stop]:
        space = self._task.space
        return self._algorithm.ask(self._history, space, num=num, rng=self._rng)

    def _record(self, decisions: Sequence[Proposal | Stop]) -> list[Job]:
        # The history has the proposed configuration, not the row that stands for it. A model whose
        # proposals all became the same few rows would see its densities collapse onto them.
        new = [d.config for d in decisions if isinstance(d, Proposal) and d.config is not None]
        self._rows += self._task.nearest(new) if new else []
        jobs = []
        for decision in decisions:
            number = self._history.record_decision(decision)
            if isinstance(decision, Proposal):
                start = self._history[number].reached
                jobs.append(Job(number, self._rows[number], start, decision.target))
        return jobs


def _counts(trial: Trial) -> bool:
    return trial.reached > 0 or trial.state == "failed"


class _Incumbent:
    """The trial that would be chosen now."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._best = (0, -np.inf)
        self.found: list[Found] = []

    def see(self, job: Job, *, seconds: float, epochs: int) -> None:
        key = (job.stop, self._task.curves[job.row][job.stop - 1])
        if key[1] > -np.inf and key > self._best:
            self._best = key
            self.found.append(Found(seconds, epochs, self._task.regrets[job.row]))


def simulate(
    searcher: Searcher,
    task: Task,
    *,
    num_workers: int,
    limit: Limit,
    on_job: Callable[[Job, float, float], None] | None = None,
) -> Outcome:
    """Run the search; ``on_job`` sees every job with its begin and its end.

    A job takes its row's time for each of its epochs, whether or not the row was trained before:
    each trial counts as one of its own, even if it shares its row.
    """
    incumbent = _Incumbent(task)
    queue: deque[Job] = deque()
    running: list[tuple[float, int, Job]] = []
    now, busy, epochs, num_jobs = 0.0, 0.0, 0, 0
    while now < limit.seconds or epochs < limit.epochs:
        while len(running) < num_workers:
            if not queue:
                queue.extend(searcher.ask(num_workers - len(running)))
                if not queue:
                    break
            job = queue.popleft()
            end = now + (job.stop - job.start) * task.epoch_seconds[job.row]
            busy += min(end, limit.seconds) - min(now, limit.seconds)
            heappush(running, (end, num_jobs, job))
            num_jobs += 1
            if on_job is not None:
                on_job(job, now, end)
        assert running, "nothing runs and nothing is asked for"
        now, _, job = heappop(running)
        epochs += job.stop - job.start
        searcher.tell(job)
        incumbent.see(job, seconds=now, epochs=epochs)
    return Outcome(incumbent.found, busy, epochs, num_jobs)


def study_seed(task: Task, repeat: int) -> int:
    """Return a seed that is the same for all methods, so that like methods meet like draws."""
    return derive_seed(repeat, "search bench", task.family, task.name)
