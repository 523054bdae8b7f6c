"""One setting of ``bench_rex``: a task and an optimizer with all schedules and budgets.

It runs in a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

import thrifty as th
from bench.common.processes import say_result
from bench.rex import workloads as tasks
from bench.rex.schedules import PLATEAU, SCHEDULES, plateau, space_of, worst_if_failed
from thrifty.core import EpochDone, Event
from thrifty.study import TrialEvent


PERCENTS = (1, 5, 10, 25, 50, 100)
TUNING_SEED = 0
Named = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A task and an optimizer; ``max_epochs`` is 100 percent.

    There are no budgets of less than an epoch.
    """

    task: Callable[..., tasks.Workload]
    optimizer: str
    rates: Sequence[float]
    max_epochs: int
    sizes: tasks.Sizes
    metric: str
    test_seeds: Sequence[int] = (1, 2, 3)

    def quick(self) -> Setting:
        sizes = (64, 64, 64)
        return Setting(
            task=self.task,
            optimizer=self.optimizer,
            rates=self.rates[2:4],
            max_epochs=2,
            sizes=sizes if self.metric == "error %" else (16, 8, 8),
            metric=self.metric,
            test_seeds=(1,),
        )

    def make_task(self) -> tasks.Workload:
        return self.task(optimizer=self.optimizer, sizes=self.sizes)

    def budgets(self) -> dict[int, int]:
        """Return the epochs by percent."""
        epochs = {percent: percent * self.max_epochs / 100 for percent in PERCENTS}
        return {percent: int(e) for percent, e in epochs.items() if e >= 1 and e == int(e)}


def _rates(first: float, num: int) -> tuple[float, ...]:
    """Return rates in multiples of 3."""
    return tuple(first * 3**i for i in range(num))


def _both(
    name: str, *, sgd: Sequence[float], adamw: Sequence[float], **options: Any
) -> dict[str, Setting]:
    return {
        f"{name}, SGD": Setting(optimizer="SGD", rates=sgd, **options),
        f"{name}, AdamW": Setting(optimizer="AdamW", rates=adamw, **options),
    }


SETTINGS: Mapping[str, Setting] = {
    **_both(
        "Transformer, text",
        sgd=_rates(0.01, 5),
        adamw=_rates(9e-4, 5),
        task=tasks.Transformer,
        max_epochs=100,
        sizes=(2048, 24, 48),
        metric="nats",
    ),
    **_both(
        "CNN, MNIST",
        sgd=_rates(0.01, 5),
        adamw=_rates(9e-4, 5),
        task=tasks.MnistCnn,
        max_epochs=100,
        sizes=(640, 400, 600),
        metric="error %",
    ),
    **_both(
        "MLP, MNIST",
        sgd=_rates(0.01, 5),
        adamw=_rates(9e-4, 5),
        task=tasks.MnistMlp,
        max_epochs=100,
        sizes=(1600, 1000, 2000),
        metric="error %",
    ),
    **_both(
        "MLP, digits",
        sgd=_rates(0.01, 5),
        adamw=_rates(2.7e-3, 5),
        task=tasks.DigitsMlp,
        max_epochs=100,
        sizes=(800, 400, 597),
        metric="error %",
    ),
}
"""The settings; the longest come first, as two run at a time."""


@dataclass
class Books:
    """Counts of what was trained, over all studies of the setting (an observer of each)."""

    epochs: int = 0
    seconds: float = 0.0
    seconds_shared: float = 0.0
    trial_epochs: int = 0
    seconds_alone: float = 0.0
    studies: int = 0
    failed: int = 0
    rates: dict[str, dict[int, float]] = field(default_factory=dict)

    def on_event(self, event: Event | TrialEvent) -> None:
        if isinstance(event, EpochDone):
            self.epochs += 1
            self.seconds += event.seconds
            alone = event.seconds if event.seconds_alone is None else event.seconds_alone
            self.seconds_shared += alone

    def close(self, study: th.Study) -> None:
        self.studies += 1
        self.trial_epochs += study.savings.trial_epochs
        self.seconds_alone += study.savings.seconds_alone or 0.0
        self.failed += sum(trial.state == "failed" for trial in study.trials)


def measure(setting: Setting, folder: str) -> dict[str, Any]:
    """Measure all schedules at all budgets: tuned at one seed, reported at the others."""
    began, books = time.perf_counter(), Books()
    task = setting.make_task()
    everything = [(name, rate) for name in SCHEDULES for rate in setting.rates]
    # One database, the shortest budgets first: a constant rate, for example, continues from the end
    # of the budget before.
    storage = f"sqlite:///{folder}/thrifty.db"
    results: dict[int, dict[str, list[float]]] = {}
    for percent, epochs in setting.budgets().items():

        def values(
            named: Named, *, seed: int, metric: str, percent: int = percent, epochs: int = epochs
        ) -> list[float]:
            study = th.Study(
                task,
                space_of(named, epochs),
                algorithm=th.GridSearch(max_epochs=epochs),
                metric=metric,
                mode="min",
                storage=storage,
                name=f"{percent} %, seed {seed}",
                seed=seed,
            )
            executor = th.Local(workers=1, threads=1)
            study.run(progress=False, executor=executor, observers=[books])
            books.close(study)
            return [worst_if_failed(trial.value) for trial in study.trials]

        tuned = values(everything, seed=TUNING_SEED, metric="valid")
        chosen = best_rates(everything, tuned)
        reported = [
            values(list(chosen.items()), seed=seed, metric="test") for seed in setting.test_seeds
        ]
        results[percent] = dict(zip(chosen, map(list, zip(*reported, strict=True)), strict=True))
        for name, rate in chosen.items():
            books.rates.setdefault(name, {})[percent] = rate
    studies_seconds = time.perf_counter() - began
    follow_plateau(setting, task, results=results, books=books)
    edges = {setting.rates[0], setting.rates[-1]}
    all_rates = [rate for by_budget in books.rates.values() for rate in by_budget.values()]
    return {
        "metric": setting.metric,
        "means": {p: {n: _plain(mean(v)) for n, v in c.items()} for p, c in results.items()},
        "seeds": {p: {n: list(map(_plain, v)) for n, v in c.items()} for p, c in results.items()},
        "rates": books.rates,
        "at_edge": mean(rate in edges for rate in all_rates),
        "studies": books.studies,
        "trial_epochs": books.trial_epochs,
        "epochs_trained": books.epochs,
        "failed_trials": books.failed,
        "shared_factor": books.seconds_alone / books.seconds_shared,
        "packed_factor": books.seconds_shared / books.seconds,
        "training_seconds": books.seconds,
        "studies_seconds": studies_seconds,
        "plateau_seconds": time.perf_counter() - began - studies_seconds,
        "cpu_seconds": time.process_time(),
    }


def best_rates(named: Named, values: Sequence[float]) -> dict[str, float]:
    """Return the best learning rate of each schedule, the smallest of equals."""
    best: dict[str, tuple[float, float]] = {}
    for (name, rate), value in zip(named, values, strict=True):
        best[name] = min(best.get(name, (math.inf, math.inf)), (value, rate))
    return {name: rate for name, (_, rate) in best.items()}


def follow_plateau(
    setting: Setting,
    task: tasks.Workload,
    *,
    results: dict[int, dict[str, list[float]]],
    books: Books,
) -> None:
    budgets = setting.budgets()
    found = plateau(
        task,
        rates=setting.rates,
        patiences=[max(1, setting.max_epochs * share // 100) for share in (5, 10)],
        budgets=list(budgets.values()),
        seeds=(TUNING_SEED, setting.test_seeds),
    )
    for percent, epochs in budgets.items():
        books.rates.setdefault(PLATEAU, {})[percent], results[percent][PLATEAU] = found[epochs]


def _plain(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--setting", choices=SETTINGS, required=True)
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    # The highest rates of a grid are meant to diverge.
    logging.getLogger("thrifty").setLevel(logging.ERROR)
    setting = SETTINGS[args.setting]
    with tempfile.TemporaryDirectory() as folder:
        say_result(measure(setting.quick() if args.quick else setting, folder))


if __name__ == "__main__":
    main()
