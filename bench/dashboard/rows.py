"""A study of any size as rows, without training, for trying dashboards.

Schedules share their first part as those of a real study do: trials of one ``width`` and ``lr``
start on the same node and leave it at the epoch of their step.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.space import Constant, Step, config_to_json
from thrifty.store import Store, StudyMoved


LEVELS = (1, 3, 9, 27, 81)
SHARES = (0.6, 0.24, 0.1, 0.045, 0.015)
WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
RATES = tuple(round(float(rate), 5) for rate in np.geomspace(0.001, 0.5, 20))
MILESTONES = (2, 5, 20, 40)
BEGAN = 1_700_000_000.0
SPEC = {
    "task": {"name": "Rows"},
    "space": {
        "lr": "Step(Choice(...), [Choice(...)], gamma=Float(0.01, 0.9))",
        "width": f"Choice({list(WIDTHS)})",
        "optimizer": "Choice(['sgd', 'adam'])",
    },
    "algorithm": "Hyperband(max_epochs=81, eta=3)",
    "max_epochs": 81,
    "metric": "accuracy",
    "mode": "max",
    "seed": 0,
}


def fill(path: Path, *, num_trials: int, name: str = "bulk", seed: int = 0) -> int:
    """Write a finished study of ``num_trials`` trials into a SQLite file; return its number."""
    with Store.open(f"sqlite:///{path}") as store:
        plan = store.plans.open(f"rows of {name}", task="Rows").id
        study = store.studies.create(name, plan=plan, spec=SPEC).id
        store.record([StudyMoved(study=study, state="done")])
    rng = np.random.default_rng(seed)
    trials = list(_trials(rng, num_trials))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        _insert(connection, "nodes", _nodes(plan, trials))
        _insert(connection, "epochs", _epochs(plan, study, trials))
        _insert(connection, "trials", [_trial(study, each) for each in trials])
        _insert(connection, "log", list(_log(study, trials)))
        _insert(connection, "stages", _stages(plan, trials))
    connection.close()
    return study


def _trials(rng: np.random.Generator, num: int) -> Iterator[dict[str, Any]]:
    num_roots = len(WIDTHS) * len(RATES) * 2
    for number in range(num):
        root = int(rng.integers(num_roots))
        rate, width = RATES[root // 2 % len(RATES)], WIDTHS[root // 2 // len(RATES)]
        reached = int(rng.choice(LEVELS, p=SHARES))
        best = 0.9 - 0.08 * abs(np.log10(rate) + 1.3) - 0.02 * abs(np.log2(width) - 8)
        yield {
            "number": number,
            "root": root,
            "node": num_roots + number,
            "start": int(rng.choice(MILESTONES)),
            "rate": rate,
            "width": width,
            "optimizer": ("sgd", "adam")[root % 2],
            "gamma": round(float(rng.uniform(0.01, 0.9)), 6),
            "reached": reached,
            "value": round(best * (1 - 0.5 / (reached + 1)) + float(rng.normal(0, 0.01)), 6),
            "state": "failed" if rng.uniform() < 0.002 else ("waiting", "stopped")[reached < 81],
        }


def _config(trial: dict[str, Any], *, root: bool = False) -> str:
    rate = trial["rate"]
    lr = Constant(rate) if root else Step(rate, [trial["start"]], gamma=trial["gamma"])
    config = {"lr": lr, "width": trial["width"], "optimizer": trial["optimizer"]}
    return json.dumps(config_to_json(config))


def _nodes(plan: int, trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shared = {"plan": plan, "epochs": 81}
    roots = {t["root"]: t for t in trials}
    return [
        {**shared, "node": n, "parent": None, "start": 0, "config": _config(t, root=True)}
        for n, t in roots.items()
    ] + [
        {
            **shared,
            "node": t["node"],
            "parent": t["root"],
            "start": t["start"],
            "config": _config(t),
        }
        for t in trials
    ]


def _epochs(plan: int, study: int, trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[int, int], float] = {}
    for t in trials:
        for epoch in range(1, t["reached"] + 1):
            node = t["root"] if epoch <= t["start"] else t["node"]
            rows.setdefault((node, epoch), t["value"] * (1 - 0.6 / (epoch + 1)))
    return [
        {
            "plan": plan,
            "node": node,
            "epoch": epoch,
            "metrics": f'{{"accuracy": {value:.5f}, "loss": {1 - value:.5f}}}',
            "seconds": 0.5,
            "worker": f"cuda-{node % 4}",
            "study": study,
        }
        for (node, epoch), value in rows.items()
    ]


def _trial(study: int, t: dict[str, Any]) -> dict[str, Any]:
    error = ["error", "the task's own error", "Traceback"] if t["state"] == "failed" else None
    return {
        "study": study,
        "number": t["number"],
        "config": _config(t),
        "node": t["node"],
        "group": "0",
        "parent": None,
        "state": t["state"],
        "target": t["reached"],
        "reached": t["reached"],
        "value": t["value"],
        "error": None if error is None else json.dumps(error),
    }


def _log(study: int, trials: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for t in trials:
        at = BEGAN + t["number"]
        entry = {"study": study, "trial": t["number"], "epoch": t["reached"]}
        yield {**entry, "kind": "asked", "value": None, "at": at}
        yield {**entry, "kind": "reported", "value": t["value"], "at": at + 0.5}


def _stages(plan: int, trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "plan": plan,
            "node": t["node"],
            "start": t["start"],
            "stop": t["reached"],
            "worker": f"cuda-{i % 8 // 2}",
            "state": "done",
            # Neighbouring pairs form one pack.
            "started_at": BEGAN + 30.0 * (i // 8),
            "seconds": 5.0 + t["reached"] / 4,
            "error": "",
        }
        for i, t in enumerate(t for t in trials if t["reached"] > t["start"])
    ]


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    columns = ", ".join(f'"{name}"' for name in names)
    marks = ", ".join(f":{name}" for name in names)
    connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)
