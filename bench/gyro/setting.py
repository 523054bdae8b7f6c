"""One setting of ``bench_gyro``'s accuracy study: all methods, rates and seeds.

It runs in a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.common.processes import say_result
from bench.gyro.workloads import (
    CONCURRENT,
    CYCLES,
    METHODS,
    NAMES,
    NUMBERS,
    RATES,
    SETTINGS,
    SUBNETWORKS,
    Network,
    Setting,
    test_error,
)
from thrifty.nn import SubnetworkEnsemble


SEEDS = range(1, 6)
PASSES = 16
"""Passes of Monte Carlo dropout, and subnetworks of an ensemble."""


class MonteCarlo(nn.Module):
    """The mean of probabilities over passes with dropout on (Gal and Ghahramani, ICML 2016)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.model.modules():
            layer.training = isinstance(layer, nn.Dropout)
        torch.manual_seed(0)
        total: torch.Tensor = sum(self.model(x).softmax(-1) for _ in range(PASSES))
        self.model.eval()
        return total / PASSES


Errors = dict[str, list[float]]


def measure(setting: Setting, folder: str, *, seeds: Sequence[int]) -> dict[str, Any]:
    """Return validation and test errors by method, rate and seed."""
    began = time.perf_counter()
    valid, test, models = trained(setting, folder, names=NAMES, seeds=seeds)
    training_seconds = time.perf_counter() - began
    methods, times_as_long = _chosen(setting, valid=valid, test=test, models=models)
    return {
        "methods": methods,
        "times_as_long": times_as_long,
        "all": {name: {"valid": valid[name], "test": test[name]} for name in NAMES},
        "training_seconds": training_seconds,
        "seconds": time.perf_counter() - began,
    }


OTHERS = {
    "numbers": [f"gyro/{all_}/{at_once}" for all_, at_once in NUMBERS],
    "cycles": [f"gyro/{SUBNETWORKS}/{CONCURRENT}/{cycles}" for cycles in CYCLES],
}
"""Other numbers of subnetworks than the paper's, and other cycles."""


def others(
    setting: Setting, folder: str, *, methods: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return errors of some methods.

    Dropout is reported beside them, and the method that validation data would choose.
    """
    names = [f"{method} {rate}" for method in ("dropout", *methods) for rate in RATES]
    valid, test, _ = trained(setting, folder, names=names, seeds=seeds)
    best: dict[str, str] = {}
    for name in names:
        method = name.partition(" ")[0]
        if method not in best or mean(valid[name]) < mean(valid[best[method]]):
            best[method] = name
    tuned = min((name for m, name in best.items() if m != "dropout"), key=lambda n: mean(valid[n]))
    chosen = {**best, "gyro, numbers tuned": tuned}
    return {
        "methods": {
            method: {"rate": float(name.partition(" ")[2]), "test": test[name]}
            for method, name in chosen.items()
        },
        "tuned": tuned,
    }


def trained(
    setting: Setting, folder: str, *, names: Sequence[str], seeds: Sequence[int]
) -> tuple[Errors, Errors, dict[str, list[nn.Module]]]:
    """Run a study for each seed; return errors and models by method and rate.

    The errors are those on validation and on test data.
    """
    valid: Errors = {name: [] for name in names}
    test: Errors = {name: [] for name in names}
    models: dict[str, list[nn.Module]] = {name: [] for name in names}
    for seed in seeds:
        study = th.Study(
            Network(setting),
            th.Space(method=th.Choice(list(names))),
            algorithm=th.GridSearch(max_epochs=setting.epochs),
            metric="error",
            mode="min",
            storage=f"sqlite:///{folder}/gyro.db",
            name=f"seed {seed}",
            seed=seed,
        )
        study.run(progress=False, executor=th.Local(workers=1, threads=1))
        for trial in study.trials:
            name = trial.config["method"]
            valid[name].append(trial.value)
            models[name].append(trial.load_model().eval())
            test[name].append(test_error(models[name][-1], setting))
    return valid, test, models


def _chosen(
    setting: Setting,
    *,
    valid: Mapping[str, Sequence[float]],
    test: Mapping[str, Sequence[float]],
    models: Mapping[str, Sequence[nn.Module]],
) -> tuple[dict[str, Any], float]:
    """Choose each method's rate by validation data; return results, and how long many passes take.

    The rate is the best over all seeds, the smallest of equals. The time is that of many passes
    beside one.
    """
    out: dict[str, Any] = {"none": {"rate": 0.0, "test": test["none 0"]}}
    times: list[float] = []
    for method in METHODS:
        _, rate = min((mean(valid[f"{method} {rate}"]), rate) for rate in RATES)
        name = f"{method} {rate}"
        out[method] = {"rate": rate, "test": test[name]}
        if method == "legacy":
            # The legacy layers have orders of their own, so there are no subnetworks to evaluate.
            continue
        errors = []
        for number, model in enumerate(models[name]):
            once, _ = _timed(model, setting)
            many, error = _timed(_of_many(method, model, seed=number), setting)
            times.append(many / once)
            errors.append(error)
        title = "MC dropout" if method == "dropout" else f"{method}, {PASSES} subnetworks"
        out[title] = {"rate": rate, "test": errors}
    return out, mean(times)


def _of_many(method: str, model: nn.Module, *, seed: int) -> nn.Module:
    """Return a model that averages many passes."""
    if method == "dropout":
        return MonteCarlo(model)
    return SubnetworkEnsemble(
        model,
        num=PASSES,
        transform=partial(torch.softmax, dim=-1),
        generator=torch.Generator().manual_seed(seed),
    ).eval()


def _timed(model: nn.Module, setting: Setting) -> tuple[float, float]:
    """Return the seconds and the test error."""
    began = time.perf_counter()
    error = test_error(model, setting)
    return time.perf_counter() - began, error


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--setting", choices=SETTINGS, required=True)
    options.add_argument("--others", choices=OTHERS)
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    setting = SETTINGS[args.setting]
    with tempfile.TemporaryDirectory() as folder:
        given = setting.quick() if args.quick else setting
        seeds = SEEDS[:2] if args.quick else SEEDS
        say_result(
            others(given, folder, methods=OTHERS[args.others], seeds=seeds)
            if args.others
            else measure(given, folder, seeds=seeds)
        )


if __name__ == "__main__":
    main()
