"""The methods of ``bench_ladder``: ``python -m bench.ladder.methods METHOD``.

Each runs in a process of its own, with one thread and one run at a time. A short run beforehand
loads what torch loads late.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import thrifty as th
from bench.common.processes import say_result, wait_for_turn
from bench.ladder.setting import SEED, Characters, Setting, train_plainly
from thrifty.core import EpochDone, StageStarted


class Stopwatch:
    """The seconds and the CPU seconds of a context, without those of the others' turns."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._waited_s = 0.0

    def __enter__(self) -> Stopwatch:
        self._began, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent = {
            "seconds": time.perf_counter() - self._began - self._waited_s,
            "cpu_s": time.process_time() - self._cpu_s,
        }

    def wait_for_turn(self) -> None:
        began = time.perf_counter()
        wait_for_turn()
        self._waited_s += time.perf_counter() - began


def plain(setting: Setting) -> dict[str, Any]:
    """Train each run separately in a plain PyTorch loop, one after the other, a run in a turn."""
    losses = []
    with Stopwatch() as watch:
        for schedule in setting.schedules():
            watch.wait_for_turn()
            losses.append(train_plainly(setting, schedule))
    return {**watch.spent, "losses": losses}


class Turns:
    """As many turns as there are separate runs; each ends after the first epoch of a stage."""

    def __init__(self, setting: Setting, watch: Stopwatch) -> None:
        num_runs = len(setting.schedules())
        num_trunk_stages = len(setting.rates) * len(setting.horizons)
        self._share = num_runs / (num_runs + num_trunk_stages)
        self._watch = watch
        self._num_stages = 0
        self._begins = False

    def on_event(self, event: object) -> None:
        if isinstance(event, StageStarted):
            self._begins = True
        elif isinstance(event, EpochDone) and self._begins:
            self._begins = False
            self._num_stages += 1
            before = int((self._num_stages - 1) * self._share)
            if int(self._num_stages * self._share) > before:
                self._watch.wait_for_turn()


def thrifty(setting: Setting) -> dict[str, Any]:
    """Train the ladder by thrifty: SQLite, checkpoints on disk, one worker."""
    with tempfile.TemporaryDirectory() as folder:
        study = th.Study(
            Characters(setting),
            setting.ladder(),
            algorithm=th.GridSearch(max_epochs=setting.horizons[-1]),
            metric="loss",
            mode="min",
            storage=f"sqlite:///{folder}/bench.db",
            name="ladder",
            seed=SEED,
        )
        with Stopwatch() as watch:
            forecast = study.plan()
            study.run(
                executor=th.Local(workers=1, threads=1, pack="solo"),
                progress=False,
                observers=[Turns(setting, watch)],
            )
        schedules = setting.schedules()
        losses: list[float | None] = [None] * len(schedules)
        for trial in study.trials:
            losses[schedules.index(trial.config["lr"])] = trial.value
        savings = study.savings
        return {
            **watch.spent,
            "losses": losses,
            "planned": forecast.unique_epochs,
            "unique": savings.unique_epochs,
            "trial_epochs": savings.trial_epochs,
            "checks_s": savings.seconds_checks,
            "law": law_of(study),
        }


def law_of(study: Any) -> dict[str, float]:
    return dict(study.fit_scaling_law(num_bootstraps=50).parameters)


def law_of_losses(setting: Setting, losses: list[float]) -> dict[str, float]:
    """Return the law of losses that separate runs have reached."""
    from thrifty.study import TrialResult  # noqa: PLC0415
    from thrifty.study._scaling_law import fit_scaling_law  # noqa: PLC0415

    trials = [
        TrialResult(
            number=number,
            config={"lr": schedule},
            state="done",
            epochs=int(schedule.epochs),
            value=loss,
            curve=(),
        )
        for number, (schedule, loss) in enumerate(zip(setting.schedules(), losses, strict=True))
    ]
    law = fit_scaling_law(trials, metric="loss", mode="min", num_bootstraps=50, seed=SEED)
    return dict(law.parameters)


def optuna(setting: Setting) -> dict[str, Any]:
    """Train by Optuna: each run is a trial of a grid, SQLite."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    schedules = setting.schedules()
    losses: list[float | None] = [None] * len(schedules)

    def objective(trial: optuna.Trial) -> float:
        index = trial.suggest_int("run", 0, len(schedules) - 1)
        losses[index] = found = train_plainly(setting, schedules[index])
        return found

    with tempfile.TemporaryDirectory() as folder, Stopwatch() as watch:
        study = optuna.create_study(
            storage=f"sqlite:///{folder}/optuna.db",
            sampler=optuna.samplers.GridSampler({"run": list(range(len(schedules)))}, seed=0),
        )
        study.optimize(objective, n_trials=len(schedules))
    return {**watch.spent, "losses": losses}


def ray(setting: Setting) -> dict[str, Any]:
    """Train by Ray Tune: each run is a trial, one at a time, in one process that trials reuse.

    Starting Ray is not counted. Its processes are not this one's, so there are no CPU seconds.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    import ray  # noqa: PLC0415
    from ray import tune  # noqa: PLC0415

    schedules = setting.schedules()

    def trainable(chosen: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tune.report({"loss": train_plainly(setting, schedules[chosen["run"]])})

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        tuner = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"run": tune.grid_search(list(range(len(schedules))))},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", max_concurrent_trials=1, reuse_actors=True
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        seconds = time.perf_counter() - began
    ray.shutdown()
    losses: list[float | None] = [None] * len(schedules)
    for result in (results[index] for index in range(len(results))):
        if result.metrics and result.config:
            losses[result.config["run"]] = result.metrics.get("loss")
    return {"seconds": seconds, "losses": losses}


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": plain,
    "thrifty": thrifty,
    "optuna": optuna,
    "ray": ray,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--text", default="")
    parser.add_argument("--shapes", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = Setting.of(quick=True, text=args.text, shapes=1)
    train_plainly(small, small.schedules()[0])
    setting = Setting.of(quick=args.quick, text=args.text, shapes=args.shapes)
    say_result(METHODS[args.method](setting))


if __name__ == "__main__":
    main()
