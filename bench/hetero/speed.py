"""Samples per second of uneven and even data parallelism on two cores, one of which may be slow."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from bench.common.processes import free_port, member, pinned


FAST, SLOW = 0, 1
"""Cores; other work runs on the second one."""

_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The other load on the second core.

    ``periods``: from when to when, in seconds since the first step, and how many competitors for
    the core.
    """

    name: str
    periods: Sequence[tuple[float, float, int]] = ()
    seconds: float = 20.0


@dataclass
class Run:
    """Steps of one run, by its first worker's clock; ``began`` is the end of the first step."""

    began: float
    seconds: float
    steps: list[dict[str, Any]] = field(repr=False)

    @property
    def samples_per_s(self) -> float:
        return sum(sum(step["sizes"]) for step in self.steps) / self.seconds

    @property
    def step_s(self) -> float:
        return median(step["step_s"] for step in self.steps)


def run(system: str, network: str, batch: int, scenario: Scenario) -> Run:
    """Run both workers of a system until the scenario ends."""
    port = free_port()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(pinned(
                "bench.hetero.speed_worker", core=core, env=member(rank, 2, port),
                system=system, network=network, batch=batch,
            ))
            for rank, core in enumerate((FAST, SLOW))
        ]  # fmt: skip
        return _watch(workers[:1], scenario)[0]


def solo(network: str, batches: Sequence[int], scenario: Scenario) -> list[Run]:
    """Run each core by itself, at the same time: the sum is the limit if exchanging were free."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(pinned(
                "bench.hetero.speed_worker",
                core=core,
                system="thrifty",
                network=network,
                batch=batch,
            ))
            for core, batch in zip((FAST, SLOW), batches, strict=True)
        ]  # fmt: skip
        return _watch(workers, scenario)


def _watch(workers: Sequence[subprocess.Popen[str]], scenario: Scenario) -> list[Run]:
    """Wait for the first steps, create the scenario's loads, and collect lines until it ends."""
    readers = [_Reader(worker) for worker in workers]
    with ExitStack() as stack:
        for begin, end, num in scenario.periods:
            if not begin:  # the load exists while speeds are measured, too
                stack.enter_context(_load(end + _START_S, num))
        for reader in readers:
            reader.wait()
        began = time.monotonic()
        for begin, end, num in sorted(scenario.periods):
            if begin:
                _sleep_until(began + begin)
                stack.enter_context(_load(end - begin, num))
        _sleep_until(began + scenario.seconds)
        for worker in workers:
            worker.kill()
    return [
        Run(
            began=began,
            seconds=scenario.seconds,
            steps=[
                step for step in reader.steps() if began < step["t"] <= began + scenario.seconds
            ],
        )
        for reader in readers
    ]


class _Reader:
    """Reader of a worker's lines, in a thread, as they come."""

    def __init__(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        self._out = worker.stdout
        self._steps: list[dict[str, Any]] = []
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait(self) -> None:
        if not self._first.wait(_START_S):
            raise RuntimeError(f"a worker did not begin within {_START_S:g} s")

    def steps(self) -> list[dict[str, Any]]:
        """Return all steps once the worker has ended."""
        self._thread.join()
        return self._steps

    def _read(self) -> None:
        for line in self._out:
            self._steps.append(json.loads(line))
            self._first.set()


def recovery(result: Run, scenario: Scenario) -> list[int]:
    """Return how many steps it takes to settle after each start and end of the load.

    Steps have settled when they are within 15 % of the level they settle at.
    """
    ends = sorted({
        t for begin, end, _ in scenario.periods for t in (begin, end) if 0 < t < scenario.seconds
    })
    marks = [*ends, scenario.seconds]
    out = []
    for since, until in pairwise(marks):
        steps = [
            step["step_s"] for step in result.steps if since < step["t"] - result.began <= until
        ]
        settled = median(steps[len(steps) // 2 :])
        good = [step_s <= 1.15 * settled for step_s in steps]
        out.append(next((at for at in range(len(good) - 2) if all(good[at : at + 3])), len(good)))
    return out


@contextmanager
def _load(seconds: float, num: int) -> Iterator[None]:
    """Run ``num`` competitors for the second core, which end by themselves."""
    code = (
        f"import os, time\nos.sched_setaffinity(0, {{{SLOW}}})\n"
        f"end = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    pass"
    )
    loads = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
