"""Fine-tuning studies that are measured on disk or killed: ``python -m bench.finetune.studies``."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import thrifty as th
from bench.common.processes import say_result
from bench.finetune.setting import SEED, Setting, Sweep, configurations
from thrifty.store import Store


READY = "READY"
VALUE_TOLERANCE = 1e-4
"""Relative difference of metrics: after a kill, trials are packed with others."""


class Measured(Sweep):
    """The sweep with its usual metrics."""

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return th.FineTune.metrics(self, model, batch)


def study_in(folder: str, setting: Setting, *, trials: int) -> th.Study:
    """Return a study by successive halving over ranks, rates and layers, with steps of rates."""
    ranks = [config["rank"] for config in configurations(16)][:: 16 // trials][:trials]
    return th.Study(
        Measured(setting),
        th.Space(
            rank=th.Choice(list(dict.fromkeys(ranks))),
            alpha=16,
            lr=th.Choice([th.Constant(1e-3), th.Step(1e-3, [2])]),
            targets=th.Choice([("q_proj", "v_proj"), ("q_proj", "o_proj")]),
        ),
        algorithm=th.SuccessiveHalving(
            max_epochs=4, num_trials=trials, eta=2, sampler=th.GridSampler()
        ),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{folder}/studies.db",
        name="sweep",
        seed=SEED,
    )


def run(folder: str, setting: Setting, *, trials: int) -> float:
    """Run the study to its end; return its seconds."""
    study = study_in(folder, setting, trials=trials)
    print(READY, flush=True)
    began = time.perf_counter()
    study.run(executor=th.Local(workers=1, threads=1, pack="fused"), progress=False)
    return time.perf_counter() - began


def records(folder: str) -> dict[str, Any]:
    """Return what a study has left: its trials, its stages and the metrics of each epoch."""
    with Store.open(f"sqlite:///{folder}/studies.db", create=False) as store:
        info = store.studies.get("sweep")
        plan = store.plans.load(info.plan)
        trials = store.studies.load(info.id).trials
    return {
        "state": str(info.state),
        "trials": len(trials),
        "epochs": sorted([e.node, e.epoch, dict(e.metrics)] for e in plan.epochs),
        "stages": sorted([n.node, n.parent or -1, n.start] for n in plan.nodes),
    }


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether two studies have left the same records, up to the rounding of packs."""
    if any(found[key] != wanted[key] for key in ("state", "trials", "stages")):
        return False
    pairs = list(zip(found["epochs"], wanted["epochs"], strict=False))
    return len(found["epochs"]) == len(wanted["epochs"]) and all(
        one[:2] == other[:2]
        and one[2].keys() == other[2].keys()
        and all(
            abs(one[2][name] - value) <= VALUE_TOLERANCE * max(1.0, abs(value))
            for name, value in other[2].items()
        )
        for one, other in pairs
    )


def kills(setting: Setting, *, trials: int, num: int) -> dict[str, Any]:
    """Kill a study at random moments; compare what it leaves with an undisturbed one."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as undisturbed:
        seconds = run(undisturbed, setting, trials=trials)
        wanted = records(undisturbed)
    killed = equal = studies = 0
    while killed < num:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(num - killed):
                if not _killed_after(folder, setting, trials, rng.uniform(0, seconds / 3)):
                    break
                killed += 1
            run(folder, setting, trials=trials)
            equal += same(records(folder), wanted)
            studies += 1
    return {"kills": killed, "studies": studies, "equal": equal, "seconds": seconds}


def _killed_after(folder: str, setting: Setting, trials: int, seconds: float) -> bool:
    """Kill a run of the study some seconds after its start; return whether it was still running."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.finetune.studies", "run", "--folder", folder),
            *("--trials", str(trials), "--setting", json.dumps(vars_of(setting))),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != READY:
        if process.poll() is not None:
            raise RuntimeError("the study has not begun")
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def vars_of(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in setting.__dataclass_fields__}


def checkpoints(setting: Setting, *, trials: int) -> dict[str, Any]:
    """Return the bytes of the checkpoints of trials, and what they have to hold."""
    configs = configurations(16)[:: 16 // trials][:trials]
    task = Sweep(setting)
    with tempfile.TemporaryDirectory() as folder:
        study = th.Study(
            Measured(setting),
            th.Space(
                rank=th.Choice(list(dict.fromkeys(c["rank"] for c in configs))),
                alpha=16,
                lr=1e-3,
                targets=th.Choice([("q_proj", "v_proj")]),
            ),
            algorithm=th.GridSearch(max_epochs=1),
            metric="loss",
            mode="min",
            storage=th.Storage(url=f"sqlite:///{folder}/s.db", checkpoints=f"{folder}/states"),
            name="sweep",
            seed=SEED,
        )
        study.run(executor=th.Local(workers=1, threads=1), progress=False)
        files = [file for file in Path(folder, "states").rglob("*") if file.is_file()]
        held = sum(f.stat().st_size for f in files if not f.name.startswith("base-"))
        base = sum(f.stat().st_size for f in files if f.name.startswith("base-"))
        wanted = sum(_needed(task, trial.config) for trial in study.trials)
        num = len(study.trials)
    return {"trials": num, "bytes": held / num, "needed": wanted / num, "base": base}


def _needed(task: Sweep, config: Mapping[str, Any]) -> int:
    """Return the bytes of a trial's trained parameters and of AdamW's two moments."""
    model = task.model(th.HyperParameters(config))
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=("run", "kills", "checkpoints"))
    parser.add_argument("--setting", type=json.loads, default={})
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(**args.setting)
    if args.job == "run":
        run(args.folder, setting, trials=args.trials)
    elif args.job == "kills":
        say_result(kills(setting, trials=args.trials, num=args.kills))
    else:
        say_result(checkpoints(setting, trials=args.trials))


if __name__ == "__main__":
    main()
