"""The methods of ``bench_sharing``: ``python -m bench.sharing.methods METHOD``.

Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import digits
from bench.common.processes import say_result


def bare_requests(args: argparse.Namespace) -> dict[str, Any]:
    """Train the stage tree of a given list of (configuration, epochs), in plain Python.

    It has no database, no checkpoints on disk and no search: only training, evaluation, and copies
    of states in memory.
    """
    tree = _BareTree(digits.configurations(args.max_epochs))
    requests = json.loads(Path(args.requests).read_text())
    requests.sort(key=lambda request: request[1])  # short ones first, as the rungs do
    began = time.perf_counter()
    best = max(tree.train(config, epochs) for config, epochs in requests)
    return tree.result(time.perf_counter() - began, best=best)


class _BareTree:
    """Copies of states in memory by prefix, the sequence of learning rates epoch by epoch."""

    def __init__(self, configs: list[digits.Config]) -> None:
        self._train, self._valid = digits.load()
        self._known: dict[Any, float] = {}
        self._states: dict[Any, Any] = {}
        self._keys: dict[str, list[Any]] = {}
        self._branches = {drop for c in configs for drop in c.get("drops", ())}
        self.num_epochs = 0

    def train(self, config: digits.Config, target: int) -> float:
        keys = self._prefixes(config, target)
        if keys[-1] in self._known:
            return self._known[keys[-1]]
        first = max((e for e in range(1, target + 1) if keys[e - 1] in self._states), default=0)
        model = digits.make_model()
        optimizer = digits.make_optimizer(model, config["lr"])
        if first:
            kept_model, kept_optimizer = self._states[keys[first - 1]]
            model.load_state_dict(kept_model)
            optimizer.load_state_dict(copy.deepcopy(kept_optimizer))
        for epoch in range(first, target):
            digits.train_epoch(model, optimizer, self._train, config=config, epoch=epoch)
            self._known[keys[epoch]] = digits.accuracy(model, self._valid)
            self.num_epochs += 1
            if epoch + 1 == target or epoch + 1 in self._branches:
                self._states[keys[epoch]] = copy.deepcopy((
                    model.state_dict(),
                    optimizer.state_dict(),
                ))
        return self._known[keys[-1]]

    def result(self, seconds: float, *, best: float) -> dict[str, Any]:
        return {"seconds": seconds, "epochs": self.num_epochs, "best": best}

    def _prefixes(self, config: digits.Config, target: int) -> list[Any]:
        name = json.dumps(config)
        keys = self._keys.setdefault(name, [])
        while len(keys) < target:
            before = keys[-1] if keys else ()
            keys.append((
                hash(before),
                len(keys),
                tuple(digits.learning_rates(config, len(keys), 23)),
            ))
        return keys[:target]


class _Trained:
    """Counter of the epochs that were really trained."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_event(self, event: Any) -> None:
        self.num_epochs += type(event).__name__ == "EpochDone"


def thrifty(args: argparse.Namespace) -> dict[str, Any]:
    """Train the same by thrifty: SQLite, checkpoints on disk, one worker."""
    import thrifty as th  # noqa: PLC0415 (the peers do not need it)
    from bench.common.digits_task import Digits, space_of  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        sampler = th.GridSampler()
        algorithm = (
            th.SuccessiveHalving(
                max_epochs=digits.halving_rungs(args.max_epochs)[-1],
                num_trials=args.configs,
                sampler=sampler,
            )
            if args.algorithm == "halving"
            else th.Hyperband(max_epochs=args.max_epochs)
        )
        configs = digits.configurations(args.max_epochs)[: args.configs]
        study = th.Study(
            Digits(),
            space_of(configs),
            algorithm=algorithm,
            metric="accuracy",
            storage=f"sqlite:///{folder}/bench.db",
            name="bench",
            seed=digits.SEED,
        )
        trained = _Trained()
        executor = th.Local(workers=1, threads=1, pack=args.pack)
        began = time.perf_counter()
        study.run(executor=executor, progress=False, observers=[trained])
        seconds = time.perf_counter() - began
        by_schedule = {schedule: i for i, schedule in enumerate(study.space["lr"].options)}
        requests = [(configs[by_schedule[t.config["lr"]]], t.epochs) for t in study.trials]
        if args.requests:
            Path(args.requests).write_text(json.dumps(requests))
        return {
            "seconds": seconds,
            "epochs": trained.num_epochs,
            "unique": study.savings.unique_epochs,
            "best": study.best_trial.value,
            "minimum": digits.minimum_epochs(requests),
            "trial_epochs": study.savings.trial_epochs,
            "checks_s": study.savings.seconds_checks,
            "checks_share": study.savings.seconds_checks / study.savings.seconds,
            "shared_factor": study.savings.shared_factor,
            "packed_factor": study.savings.packed_factor,
            "packed_interval": study.savings.packed_interval,
        }


def optuna(args: argparse.Namespace) -> dict[str, Any]:
    """Train by Optuna: every configuration a trial, successive halving as a pruner, SQLite."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    configs = digits.configurations(args.max_epochs)[: args.configs]
    train, valid = digits.load()
    num_epochs = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal num_epochs
        config = configs[trial.suggest_int("index", 0, len(configs) - 1)]
        model = digits.make_model()
        optimizer = digits.make_optimizer(model, config["lr"])
        score = 0.0
        for epoch in range(args.max_epochs):
            digits.train_epoch(model, optimizer, train, config=config, epoch=epoch)
            num_epochs += 1
            score = digits.accuracy(model, valid)
            trial.report(score, epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return score

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = optuna.create_study(
            storage=f"sqlite:///{folder}/optuna.db",
            sampler=optuna.samplers.GridSampler({"index": list(range(len(configs)))}, seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
            direction="maximize",
        )
        study.optimize(objective, n_trials=len(configs))
        seconds = time.perf_counter() - began
        curves = [t.intermediate_values for t in study.trials]
        best = max(curve[max(curve)] for curve in curves)  # pruned trials keep their last value
    return {
        "seconds": seconds,
        "epochs": num_epochs,
        "best": best,
        "best_complete": study.best_value,
    }


def ray(args: argparse.Namespace) -> dict[str, Any]:
    """Train by Ray Tune: every configuration a trial, ASHA, two at a time."""
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    import ray  # noqa: PLC0415
    from ray import tune  # noqa: PLC0415
    from ray.tune.schedulers import ASHAScheduler  # noqa: PLC0415

    configs = digits.configurations(args.max_epochs)[: args.configs]

    def trainable(chosen: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        config = configs[chosen["index"]]
        train, valid = digits.load()
        model = digits.make_model()
        optimizer = digits.make_optimizer(model, config["lr"])
        for epoch in range(args.max_epochs):
            digits.train_epoch(model, optimizer, train, config=config, epoch=epoch)
            tune.report({"accuracy": digits.accuracy(model, valid)})

    began = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    init_seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        tuner = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"index": tune.grid_search(list(range(len(configs))))},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                max_concurrent_trials=2,
                scheduler=ASHAScheduler(max_t=args.max_epochs, grace_period=1, reduction_factor=3),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        seconds = time.perf_counter() - began
    ray.shutdown()
    found = [results[index].metrics for index in range(len(results))]
    last = [metrics for metrics in found if metrics and "accuracy" in metrics]
    return {
        "seconds": seconds,
        "epochs": sum(m["training_iteration"] for m in last),
        "best": max(m["accuracy"] for m in last),
        "init_seconds": init_seconds,
        "trials": len(last),
    }


METHODS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "bare_requests": bare_requests,
    "thrifty": thrifty,
    "optuna": optuna,
    "ray": ray,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--max-epochs", type=int, default=81)
    parser.add_argument("--configs", type=int, default=81)
    parser.add_argument("--pack", default="solo")
    parser.add_argument("--algorithm", choices=("halving", "hyperband"), default="halving")
    parser.add_argument("--requests", default="")
    args = parser.parse_args()
    digits.warm_up()
    say_result(METHODS[args.method](args))


if __name__ == "__main__":
    main()
