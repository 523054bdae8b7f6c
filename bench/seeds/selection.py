"""One task of ``bench_seeds`` in a process of its own: the truth, and what each method chooses."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
import torch

import thrifty as th
from bench.common.processes import RESULT
from bench.seeds.workloads import SETTINGS, Setting, Small, train_plainly
from thrifty.core import derive_seed, replica_seed


TRUTH = 0
"""The seed of the study that makes the truth; those of the repeats are 1, 2, ..."""
TRUTH_SEEDS = 30
SEEDS = 5


def study_of(setting: Setting, folder: Path, *, seeds: int, seed: int, name: str) -> th.Study:
    configs = setting.configs
    space = th.Space(**{
        key: th.Choice(sorted({config[key] for config in configs})) for key in configs[0]
    })
    return th.Study(
        Small(setting),
        space,
        algorithm=th.GridSearch(max_epochs=setting.epochs),
        metric="valid_loss",
        mode="min",
        storage=f"sqlite:///{folder}/{name}.db",
        name=name,
        seed=seed,
        seeds=seeds,
    )


def place_of(setting: Setting, config: Mapping[str, Any]) -> int:
    """Return the place of a configuration among those of the setting."""
    return setting.configs.index({name: config[name] for name in setting.configs[0]})


def run(study: th.Study, *, pack: Any = "auto") -> float:
    """Run a study with one thread; return the seconds."""
    began = time.perf_counter()
    study.run(progress=False, executor=th.Local(threads=1, pack=pack))
    return time.perf_counter() - began


def truth_of(setting: Setting, folder: Path, *, seeds: int) -> tuple[list[float], float]:
    """Return each configuration's mean loss over many seeds that no method selects with.

    Also return how sure the study is which one is best.
    """
    study = study_of(setting, folder, seeds=seeds, seed=TRUTH, name="truth")
    run(study)
    found = [math.inf] * len(setting.configs)
    for trial in study.trials:
        if trial.value is not None and trial.state != "failed":
            found[place_of(setting, trial.config)] = trial.value
    return found, study.best_trial.certainty or 0.0


def check_disjoint(*, repeats: int, seeds: int) -> None:
    """Check that no method selects with a seed that the truth is made of."""
    truth = {replica_seed(TRUTH, number) for number in range(seeds)}
    used = {replica_seed(repeat, n) for repeat in range(1, repeats + 1) for n in range(SEEDS)}
    used |= {seed for repeat in range(1, repeats + 1) for seed in optuna_seeds(repeat)}
    assert truth.isdisjoint(used), "a method selects with a seed of the truth"


def optuna_seeds(repeat: int) -> list[int]:
    return [derive_seed(repeat, "optuna", number) % 2**31 for number in range(SEEDS)]


def ours(setting: Setting, folder: Path, *, repeat: int) -> dict[str, Any]:
    """Return what a study with several seeds chooses, how sure it is, and its seconds."""
    study = study_of(setting, folder, seeds=SEEDS, seed=repeat, name=f"r{repeat}")
    seconds = run(study)
    best = study.best_trial
    packed = study.savings.packed_epochs / study.savings.unique_epochs
    return {
        "seconds": seconds,
        "choice": place_of(setting, best.config),
        "certainty": best.certainty,
        "packed": packed,
    }


def optunas(setting: Setting, *, repeat: int, seconds: float) -> dict[str, Any]:
    """Return what Optuna chooses whose objective is the mean over as many seeds.

    It tries the same grid in random order until the seconds are over. A trial that has started is
    finished, so it never has less time than ours.
    """
    configs = setting.configs
    grid = {"place": list(range(len(configs)))}

    def objective(trial: optuna.Trial) -> float:
        place = trial.suggest_categorical("place", grid["place"])
        seeds = optuna_seeds(repeat)
        return mean(train_plainly(setting, configs[place], seed=seed) for seed in seeds)

    sampler = optuna.samplers.GridSampler(grid, seed=repeat)
    study = optuna.create_study(sampler=sampler)
    began = time.perf_counter()
    study.optimize(objective, timeout=seconds, n_trials=len(configs), catch=(ValueError,))
    spent = time.perf_counter() - began
    usable = [t for t in study.trials if t.value is not None and math.isfinite(t.value)]
    best = min(usable, key=lambda t: t.value or 0.0)
    return {"seconds": spent, "choice": best.params["place"], "tried": len(study.trials)}


def one_seed(setting: Setting, folder: Path, *, repeat: int) -> dict[str, Any]:
    """Return what the first seed alone would choose, from the results of ``ours``."""
    study = study_of(setting, folder, seeds=SEEDS, seed=repeat, name=f"r{repeat}")
    finished = [t for t in study.trials if t.curves and t.state != "failed"]
    best = min(finished, key=lambda t: t.curves[0][-1])
    return {"choice": place_of(setting, best.config)}


def in_turn(setting: Setting, folder: Path, *, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of one study trained in turn and packed, alternating."""
    found = []
    for number in range(rounds):
        row = {}
        for pack in ("solo", "auto") if number % 2 else ("auto", "solo"):
            study = study_of(setting, folder, seeds=SEEDS, seed=1000, name=f"{pack}{number}")
            row[f"{pack}, whole run"] = run(study, pack=pack)
            row[pack] = study.savings.seconds
        found.append(row)
    return found


def judged(choices: Sequence[int], truth: Sequence[float]) -> dict[str, Any]:
    """Return in which repeats the true best was chosen, and the regrets as shares of its loss."""
    best = int(np.argmin(truth))
    return {
        "hits": [choice == best for choice in choices],
        "regrets": [truth[choice] / truth[best] - 1 for choice in choices],
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--task", choices=SETTINGS, required=True)
    options.add_argument("--repeats", type=int, required=True)
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    setting = SETTINGS[args.task]
    with TemporaryDirectory() as name:
        folder = Path(name)
        truth_seeds = 4 if args.quick else TRUTH_SEEDS
        check_disjoint(repeats=args.repeats, seeds=truth_seeds)
        truth, truth_certainty = truth_of(setting, folder, seeds=truth_seeds)
        rows: dict[str, list[dict[str, Any]]] = {"ours": [], "optuna": [], "one seed": []}
        for repeat in range(1, args.repeats + 1):
            rows["ours"].append(ours(setting, folder, repeat=repeat))
            limit = rows["ours"][-1]["seconds"]
            rows["optuna"].append(optunas(setting, repeat=repeat, seconds=limit))
            rows["one seed"].append(one_seed(setting, folder, repeat=repeat))
        speed = in_turn(setting, folder, rounds=1 if args.quick else 3)
    result = {
        "truth": truth,
        "truth_certainty": truth_certainty,
        "methods": {
            name: judged([row["choice"] for row in found], truth) for name, found in rows.items()
        },
        "seconds": median(row["seconds"] for row in rows["ours"]),
        "optuna_seconds": median(row["seconds"] for row in rows["optuna"]),
        "tried": mean(row["tried"] for row in rows["optuna"]),
        "plain_seconds": len(setting.configs)
        * median(row["seconds"] / row["tried"] for row in rows["optuna"]),
        "certainties": [row["certainty"] for row in rows["ours"]],
        "packed": mean(row["packed"] for row in rows["ours"]),
        "speed_ups": [row["solo"] / row["auto"] for row in speed],
        "speed": speed,
    }
    print(RESULT + json.dumps(result))


if __name__ == "__main__":
    main()
