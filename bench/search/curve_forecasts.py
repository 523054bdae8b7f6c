"""Freeze-thaw beside its regret: calibration of the curve model, and the time of its decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from bench.search.curves import MAX_EPOCHS, Task
from thrifty.core import derive_seed
from thrifty.search import FreezeThaw, History, Proposal
from thrifty.search._curve_model import CannotFit
from thrifty.search._curve_view import Candidate, CurveView, StageForest
from thrifty.space import Choice, Float, Int, Space


AHEAD = (2, 4, 16)
"""How many times the observed epochs a forecast looks ahead."""
RUNGS = (1, 2, 4, 8, 16)
NUM_TRIALS = 48
QUANTILES = {"50%": 0.6745, "90%": 1.6449}
NUMS = (100, 1_000, 10_000, 100_000)
NUM_ASKED = 5
SPACE = Space(
    lr=Float(1e-4, 1.0, log=True),
    momentum=Float(0.0, 0.99),
    width=Int(16, 1024, log=True),
    kind=Choice(["a", "b", "c"]),
)


def calibration(tasks: Sequence[Task], *, repeats: int) -> list[dict[str, Any]]:
    """Return how often intervals of the model hold the score that a trial reached later.

    A study of ``NUM_TRIALS`` random trials promotes half of each rung, by score or at random. Each
    trial that waits is forecast, at 2, 4 and 16 times its epochs. Trials that diverge later are
    left out. A row is the mean over tasks.
    """
    found: dict[int, list[np.ndarray]] = {times: [] for times in AHEAD}
    for task in tasks:
        here: dict[int, list[np.ndarray]] = {times: [] for times in AHEAD}
        for repeat in range(repeats):
            for times, errors in _errors(task, derive_seed(repeat, "forecasts", task.name)).items():
                here[times] += errors
        for times, errors in here.items():
            if errors:
                found[times].append(np.mean([_row(error) for error in errors], axis=0))
    return [
        {"ahead": f"{times} x", **dict(zip(_NAMES, np.mean(rows, axis=0).tolist(), strict=True))}
        for times, rows in found.items()
    ]


_NAMES = ("50% interval", "90% interval", "mean deviation", "mean error")


def _row(error: np.ndarray) -> list[float]:
    """Return coverages, and how far intervals and errors are, in distances best to median."""
    size, deviation = error
    inside = [size <= q * deviation for q in QUANTILES.values()]
    return [*map(float, inside), float(deviation), float(size)]


def _errors(task: Task, seed: int) -> dict[int, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(task.configs), size=NUM_TRIALS, replace=len(task.configs) < NUM_TRIALS)
    history = _partly_trained(task, rows, rng)
    out: dict[int, list[np.ndarray]] = {times: [] for times in AHEAD}
    view = CurveView(task.space, StageForest.of(history, epochs=RUNGS[-1]), RUNGS)
    try:
        model = view.model(list(history), history, [])
    except CannotFit:
        return out
    for times in AHEAD:
        waiting = [
            trial
            for trial in history
            if trial.state == "waiting" and trial.reached * times in RUNGS
        ]
        truths = [task.curves[rows[t.number]][t.reached * times - 1] for t in waiting]
        known = [Candidate(t.config, t.number, t.scores, t.reached) for t in waiting]
        if not known:
            continue
        means, deviations = model.predict(view.places(known, [t.reached * times for t in waiting]))
        deviations = np.sqrt(np.square(deviations) + model.noise**2)
        sizes = np.abs(view.scale.apply(np.array(truths)) - means)
        finite = np.isfinite(truths)
        out[times] += list(np.stack([sizes, deviations], axis=1)[finite])
    return out


def _partly_trained(task: Task, rows: np.ndarray, rng: np.random.Generator) -> History:
    history = History()

    def train(number: int) -> None:
        scores = task.curves[rows[number]][: history[number].target]
        if np.isfinite(scores[-1]):
            history.record_scores(number, scores)
        else:
            history.record_failure(number)

    for row in rows:
        train(history.record_decision(Proposal(target=RUNGS[0], config=task.configs[row])))
    for here, there in pairwise(RUNGS):
        waiting = [number for _, number in history.waiting(here)]
        num = len(waiting) // 2
        best = waiting[: num // 2]
        others = rng.permutation(waiting[num // 2 :])[: num - num // 2].tolist()
        for number in [*best, *others]:
            train(history.record_decision(Proposal(target=there, trial=number)))
    return history


def decision_times(nums: Sequence[int] = NUMS) -> list[dict[str, Any]]:
    """Return the seconds of a decision after ``n`` trials: the first of a process, and later."""
    return [_decision_time(num) for num in nums]


def _decision_time(num: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    algorithm = FreezeThaw(max_epochs=MAX_EPOCHS, num_trials=2 * num, budget_epochs=100 * num)
    history = History(max_epochs=MAX_EPOCHS)
    scores = np.cumsum(rng.random((num, MAX_EPOCHS)), axis=1) / MAX_EPOCHS
    for number in range(num):
        target = (1, 3, 9, 27)[int(rng.choice(4, p=[0.7, 0.2, 0.07, 0.03]))]
        for rung in (rung for rung in algorithm.rungs() if rung <= target):
            config = SPACE.sample(rng) if rung == 1 else None
            trial = None if rung == 1 else number
            history.record_decision(Proposal(target=rung, trial=trial, config=config))
            history.record_scores(number, scores[number, :rung].tolist())
    seconds = []
    for seed in range(1 + NUM_ASKED):
        began = time.perf_counter()
        decisions = algorithm.ask(history, SPACE, num=1, rng=np.random.default_rng(seed))
        seconds.append(time.perf_counter() - began)
        for decision in decisions:
            number = history.record_decision(decision)
            history.record_scores(number, rng.random(history[number].target).tolist())
    return {
        "trials": num,
        "first decision [s]": seconds[0],
        "later decisions [s], median": float(np.median(seconds[1:])),
        "later decisions [s], longest": max(seconds[1:]),
    }
