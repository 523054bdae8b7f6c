"""The store: durable reports on SQLite, and the time to show the status of a large study.

    python -m bench.bench_store [--quick]

A report is what a worker's message leads to: the metrics of an epoch and a trial's result, two rows
and a log entry. They are written in batches, as a study does. For comparison, Optuna's own SQLite
storage writes 100 trials of 10 values.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import optuna

from bench.common.harness import at_least, at_most, finish, parser, table
from thrifty.store import EpochRecord, Record, Store, TrialAsked, TrialReported


BATCH = 100
CONFIG = {"lr": 0.1, "width": 64}


def fill(store: Store, *, num_trials: int) -> tuple[int, int]:
    """Create a study with many trials, requested and not yet reported."""
    plan = store.plans.open("bench", task="bench").id
    study = store.studies.create(
        "bench", plan=plan, spec={"metric": "accuracy", "mode": "max", "max_epochs": 81}
    ).id
    asked: list[Record] = [
        TrialAsked(study=study, trial=i, target=1, config=CONFIG, group=0, parent=None, node=i)
        for i in range(num_trials)
    ]
    for first in range(0, num_trials, 10_000):
        store.record(asked[first : first + 10_000])
    return plan, study


def reports(plan: int, study: int, *, first: int, num: int) -> list[Record]:
    out: list[Record] = []
    for i in range(first, first + num):
        value = (i * 7919 % 1000) / 1000
        metrics = {"accuracy": value, "train_loss": 1 - value}
        out.append(
            EpochRecord(plan=plan, node=i, epoch=1, metrics=metrics, seconds=0.01, worker="cpu-0")
        )
        out.append(TrialReported(study=study, trial=i, epoch=1, value=value))
    return out


def measure_thrifty(folder: Path, *, num_trials: int, repeats: int) -> dict[str, Any]:
    url = f"sqlite:///{folder}/thrifty.db"
    with Store.open(url) as store:
        plan, study = fill(store, num_trials=num_trials)
        batches = []
        for first in range(0, num_trials, BATCH):
            records = reports(plan, study, first=first, num=min(BATCH, num_trials - first))
            began = time.perf_counter()
            store.record(records)
            batches.append(time.perf_counter() - began)
        single = []
        for i in range(50):
            records = reports(plan, study, first=i, num=1)
            began = time.perf_counter()
            store.record(records)
            single.append(time.perf_counter() - began)
    status = [_status(url) for _ in range(repeats)]
    return {
        "reports_per_s": num_trials / sum(batches),
        "batch_ms_median": median(batches) * 1e3,
        "single_ms_median": median(single) * 1e3,
        "status_s": median(status),
        "file_mb": (folder / "thrifty.db").stat().st_size / 2**20,
    }


def measure_optuna(folder: Path) -> float:
    """Return the seconds for 100 trials of 10 values."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=f"sqlite:///{folder}/optuna.db")
    began = time.perf_counter()
    for _ in range(100):
        trial = study.ask()
        trial.suggest_float("lr", 0.0, 1.0)
        for step in range(10):
            trial.report(0.5, step)
        study.tell(trial, 0.5)
    return time.perf_counter() - began


def main() -> None:
    args = parser(__doc__).parse_args()
    num_trials = 2_000 if args.quick else 100_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = measure_thrifty(folder, num_trials=num_trials, repeats=args.repeats)
        theirs = measure_optuna(folder)
    figures = {
        **ours,
        "num_trials": num_trials,
        "batch_size": BATCH,
        "optuna_100_trials_10_values_s": theirs,
        "optuna_reports_per_s": 1000 / theirs,
    }
    table([{"figure": name, "value": value} for name, value in figures.items()])
    finish(
        "store",
        figures,
        [
            at_least("reports recorded durably a second", ours["reports_per_s"], 2_000),
            at_most(f"thrifty status with {num_trials:,} trials, in s", ours["status_s"], 1.0),
        ],
    )


def _status(url: str) -> float:
    """Return the wall-clock time of the command, process start included."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "thrifty.cli", "status", "--storage", url]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
