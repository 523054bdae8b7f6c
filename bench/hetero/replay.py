"""Step times of real workers, replayed under several rules for splitting a batch."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common.harness import data_file
from thrifty.hetero import SimulatedWorker, simulate_job
from thrifty.perf import Balancer, SplitChange, StepCurve, split_batch


JOBS = (1, 2, 3, 4)
CALM = (1, 2, 3)
BATCH = 640
_MEASURED = 5


def path(job: int) -> Path:
    return data_file("systems", "alibaba_minibatch", f"job_{job}_norm.csv")


def times(job: int) -> np.ndarray:
    """Return the step times [steps, workers] of a job.

    A step that a worker did not report takes as long as its last one.
    """
    with path(job).open() as lines:
        rows = [
            (int(row["time"]), int(row["worker"]), float(row["batch_time_norm"]))
            for row in csv.DictReader(lines)
        ]
    steps = sorted({row[0] for row in rows})
    workers = sorted({row[1] for row in rows})
    out = np.full((len(steps), len(workers)), np.nan)
    place = {step: at for at, step in enumerate(steps)}, {w: at for at, w in enumerate(workers)}
    for step, worker, value in rows:
        out[place[0][step], place[1][worker]] = value
    for at in range(1, len(out)):
        missing = np.isnan(out[at])
        out[at, missing] = out[at - 1, missing]
    for column in out.T:
        column[np.isnan(column)] = column[~np.isnan(column)][0]
    return out


class Even:
    """Even splitting, as DDP does."""

    def __init__(self, curves: Sequence[StepCurve], batch: int) -> None:
        self.split = split_batch([StepCurve(sample_s=1.0)] * len(curves), batch)

    def observe(self, seconds: Sequence[float]) -> SplitChange | None:
        return None


class LastSpeed:
    """Splitting by predicted speeds, as in LB-BSP (Chen et al., SoCC 2020).

    Each step is split by speeds predicted from earlier steps. The prediction here is an exponential
    mean of weight ``weight``; theirs is a small recurrent network.
    """

    def __init__(self, curves: Sequence[StepCurve], batch: int, *, weight: float = 0.2) -> None:
        self._batch, self._weight = batch, weight
        self._sample_s = [curve.sample_s for curve in curves]
        self._resplit()

    def observe(self, seconds: Sequence[float]) -> SplitChange | None:
        for worker, (time_s, size) in enumerate(zip(seconds, self.split, strict=True)):
            if size:
                self._sample_s[worker] += self._weight * (time_s / size - self._sample_s[worker])
        self._resplit()
        return None

    def _resplit(self) -> None:
        self.split = split_batch([StepCurve(sample_s=each) for each in self._sample_s], self._batch)


class Proportional:
    """A proportional controller, as in OmniLearn (Tyagi and Sharma, 2025).

    It moves each batch by its distance from the mean time, beyond a dead band.
    """

    def __init__(
        self, curves: Sequence[StepCurve], batch: int, *, gain: float = 0.5, band: float = 0.05
    ) -> None:
        self._batch, self._gain, self._band = batch, gain, band
        self._want = [float(size) for size in split_batch(curves, batch)]
        self.split = split_batch(curves, batch)

    def observe(self, seconds: Sequence[float]) -> SplitChange | None:
        mean = sum(seconds) / len(seconds)
        errors = [(mean - time_s) / mean for time_s in seconds]
        if max(map(abs, errors)) < self._band:
            return None
        self._want = [
            max(1.0, want * (1 + self._gain * error / (1 - min(error, 0.9))))
            for want, error in zip(self._want, errors, strict=True)
        ]
        total = sum(self._want)
        self._want = [want * self._batch / total for want in self._want]
        # Round the controller's wishes to whole numbers that sum to the batch.
        self.split = split_batch([StepCurve(sample_s=1 / want) for want in self._want], self._batch)
        return None


RULES: dict[str, Callable[[Sequence[StepCurve], int], Any]] = {
    "even (DDP)": Even,
    "each step anew (LB-BSP-like)": LastSpeed,
    "proportional (OmniLearn-like)": Proportional,
    "thrifty": lambda curves, batch: Balancer(curves, batch=batch),
}


def replay(job: int, *, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each rule.

    A traced step counts as one of an equal part of the batch, and time as proportional to samples.
    Every rule starts from the first five steps' speeds, except even splitting, which needs none.
    """
    traced = times(job)
    traced = traced[: 400 if quick else None]
    per_sample = traced / (BATCH / traced.shape[1])
    first = np.median(per_sample[:_MEASURED], axis=0)
    workers = [
        SimulatedWorker(
            name=str(at),
            curve=StepCurve(sample_s=float(first[at])),
            slowness=(per_sample[:, at] / first[at]).tolist(),
        )
        for at in range(traced.shape[1])
    ]
    rows: list[dict[str, Any]] = []
    for name, rule in RULES.items():
        run = simulate_job(workers, batch=BATCH, num_steps=len(traced), policy=rule)
        cost = [max(step.busy_s) / median(step.busy_s) for step in run.steps]
        splits = [step.sizes for step in run.steps]
        alarms = [
            (at, step.change)
            for at, step in enumerate(run.steps)
            if step.change is not None and step.change.reason in {"slower", "faster"}
        ]
        rows.append({
            "job": job,
            "rule": name,
            "max / median, p50": float(np.percentile(cost, 50)),
            "p90": float(np.percentile(cost, 90)),
            "times as fast as even": 0.0,
            "seconds": run.seconds,
            "changes, % of steps": 100 * sum(map(_differ, splits, splits[1:])) / len(splits),
            "alarms": len(alarms),
            "false": sum(_is_false(per_sample / first, at, change) for at, change in alarms),
            "steps": len(splits),
        })
    even = rows[0]["seconds"]
    for row in rows:
        row["times as fast as even"] = even / row.pop("seconds")
    rows.append({
        "job": job,
        "rule": "no rule: every step's speeds known before",
        "times as fast as even": even / float((BATCH / (1 / per_sample).sum(axis=1)).sum()),
        "max / median, p50": 1.0,
        "p90": 1.0,
        "steps": len(splits),
    })
    return rows


def _differ(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other


def _is_false(slowness: np.ndarray, at: int, change: SplitChange) -> bool:
    """Return whether the workers' change of speed did not last.

    That is so if the next ten steps are nearer to the fifty before than to the five that triggered
    it.
    """
    for worker in change.workers:
        before = np.median(slowness[max(0, at - 54) : max(1, at - 4), worker])
        alarm = np.median(slowness[max(0, at - 4) : at + 1, worker])
        after = np.median(slowness[at + 1 : at + 11, worker]) if at + 1 < len(slowness) else alarm
        if abs(after - before) < abs(after - alarm):
            return True
    return False
