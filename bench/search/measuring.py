"""Simulated searches as units of work: measured in a few processes, kept in a file, resumed.

A unit is all repetitions of one method on one task with one number of workers.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from bench.search.curves import Task
from bench.search.methods import Method, auto_variants, boss_variants, methods, pass_epochs
from bench.search.peers import peers
from bench.search.report import SHARES
from bench.search.simulator import Limit, OurSearch, Outcome, Searcher, simulate, study_seed
from thrifty.search import Auto


SECONDS_BETWEEN_NEWS = 60.0


class Unit(NamedTuple):
    """All repetitions of one method (one of ours, or a peer) on one task.

    With ``in_epochs``, each study also goes on until its epochs are used up, so that its regrets
    can be read at equal epochs. One worker's studies always do.
    """

    method: str
    num_workers: int
    task: int
    repeats: int
    in_epochs: bool = False


class Measurement(NamedTuple):
    """Results by repetition.

    They are regrets at the shares of the time and of the epochs, utilisation, and milliseconds of
    processor time.
    """

    unit: Unit
    by_time: np.ndarray
    by_epochs: np.ndarray
    utilisation: np.ndarray
    ms: np.ndarray


def limit(num_workers: int, *, in_epochs: bool = False) -> Limit:
    """Return the time in which that many workers (8 at most) would train one pass.

    The mean epoch takes 1 s. Epochs are what that many busy workers train in this time.
    """
    budget = pass_epochs()
    counts = in_epochs or num_workers == 1
    return Limit(
        seconds=budget / min(num_workers, 8), epochs=budget * passes(num_workers) if counts else 0
    )


def passes(num_workers: int) -> int:
    """Return how many passes of Hyperband that many busy workers train within their limit."""
    return max(num_workers // 8, 1)


def makers(num_workers: int) -> dict[str, Callable[[Task, int], Searcher]]:
    """Return what makes the searcher of each method, for a task and a seed."""

    def ours(method: Method, task: Task, seed: int) -> Searcher:
        algorithm = method.make(passes(num_workers))
        if isinstance(algorithm, Auto):
            algorithm = algorithm.chosen(task.space, workers=num_workers).algorithm
        return OurSearch(algorithm, task, seed=seed)

    out: dict[str, Callable[[Task, int], Searcher]] = {
        method.name: partial(ours, method)
        for method in [*methods(), *boss_variants(), *auto_variants()]
    }
    return out | {peer.name: peer.make for peer in peers()[0]}


_tasks: list[Task] = []
"""The tasks, which the worker processes inherit."""


def measure(unit: Unit) -> Measurement:
    """Run all studies of a unit, one after the other."""
    make, task = makers(unit.num_workers)[unit.method], _tasks[unit.task]
    ends = limit(unit.num_workers, in_epochs=unit.in_epochs)
    outcomes: list[Outcome] = []
    ms: list[float] = []
    for repeat in range(unit.repeats):
        began = time.process_time()
        searcher = make(task, study_seed(task, repeat))
        outcomes.append(simulate(searcher, task, num_workers=unit.num_workers, limit=ends))
        ms.append((time.process_time() - began) * 1e3)
    return Measurement(
        unit,
        np.array([[o.regret_at(seconds=s * ends.seconds) for s in SHARES] for o in outcomes]),
        np.array([[o.regret_at(epochs=s * ends.epochs) for s in SHARES] for o in outcomes]),
        np.array([o.busy_seconds for o in outcomes]) / (ends.seconds * unit.num_workers),
        np.array(ms),
    )


MeasureAll = Callable[[Sequence[Unit]], list[Measurement]]


@contextmanager
def measuring(
    tasks: Sequence[Task], num_processes: int, *, kept: Kept | None = None
) -> Iterator[MeasureAll]:
    """Yield a function that measures units in a few processes, in the given order.

    Units that ``kept`` holds are not measured again. News are printed each minute.
    """
    _tasks[:] = tasks
    for task in tasks:
        task.prepare()
    gc.freeze()
    with get_context("fork").Pool(num_processes, initializer=_use_one_thread) as pool:

        def measure_all(units: Sequence[Unit]) -> list[Measurement]:
            found = [] if kept is None else kept.known(units, tasks)
            known = {measurement.unit for measurement in found}
            missing = [unit for unit in units if unit not in known]
            if known:
                print(f"{len(known):,} of {len(units):,} units are known", flush=True)
            began = last = time.perf_counter()
            for number, measurement in enumerate(pool.imap_unordered(measure, missing), 1):
                found.append(measurement)
                if kept is not None:
                    kept.add(measurement, tasks)
                now = time.perf_counter()
                if now - last > SECONDS_BETWEEN_NEWS:
                    last = now
                    minutes = (now - began) / 60
                    print(f"{number:,} of {len(missing):,} units, {minutes:.0f} min", flush=True)
            return found

        yield measure_all


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    threadpool_limits(1)


class Kept:
    """A file with one line for each unit that has been measured; a later call reads it.

    Delete the file after a change of the code: it does not know that its lines are old.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A line that was being written as the process ended has no end.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
        self._lines = [json.loads(line) for line in lines]

    def known(self, units: Sequence[Unit], tasks: Sequence[Task]) -> list[Measurement]:
        """Return what is known of these units."""
        by_name = {tuple(line["unit"]): line for line in self._lines}
        out = []
        for unit in units:
            line = by_name.get(_name(unit, tasks))
            if line is not None:
                out.append(Measurement(unit, *(np.array(line[name]) for name in _ARRAYS)))
        return out

    def add(self, measurement: Measurement, tasks: Sequence[Task]) -> None:
        """Write a line at the end of the file."""
        line: dict[str, Any] = {name: getattr(measurement, name).tolist() for name in _ARRAYS}
        line["unit"] = _name(measurement.unit, tasks)
        line |= {"call": self._began, "elapsed": time.time() - self._began}
        self._lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def earlier_seconds(self) -> float:
        """Return how long earlier calls ran until their last lines."""
        longest: dict[float, float] = {}
        for line in self._lines:
            if line["call"] != self._began:
                longest[line["call"]] = max(longest.get(line["call"], 0.0), line["elapsed"])
        return sum(longest.values())


_ARRAYS = ("by_time", "by_epochs", "utilisation", "ms")


def _name(unit: Unit, tasks: Sequence[Task]) -> tuple[Any, ...]:
    task = tasks[unit.task]
    return (unit.method, unit.num_workers, task.family, task.name, unit.repeats, unit.in_epochs)
