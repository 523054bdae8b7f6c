"""Schedules in the space: epochs until the best configuration of a whole grid is found.

Three spaces for a small network: 81 schedules that share prefixes, WSD schedules with one stable
phase for each rate, and schedules mixed with widths and batch sizes. First, each grid is trained as
a whole. Then searches run on the tables of its curves, with the options of each choice in random
orders: freeze-thaw, ``Auto``, ASHA and Hyperband of ours, Optuna and Ray Tune.

Our epochs are unique ones: an epoch that trials share counts once. Peers train each trial by
itself. A search that ends without the best costs the whole grid in addition. A second table has
what our algorithms train and find if they end by themselves, a third one what samplers cost and
save that prefer configurations that share training (``share=``), on a fourth space.

``--half tuning`` runs the workloads on which options of algorithms may be chosen.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

import thrifty as th
from bench.common.harness import Goal, at_least, finish, parser, table
from bench.schedules.samplers import costs_of_sharing
from bench.schedules.searches import (
    OWN_BUDGETS,
    ROUNDING,
    Found,
    Search,
    UntilFound,
    algorithms,
    ended,
    ours,
    peers,
)
from bench.schedules.workloads import SPACES, STEPS, Table, trained, workloads


REGRETS = (0.0, 0.02, 0.1)
"""How good a configuration must be: 0 is the best of the grid, 1 its median."""
WORKERS = 8
NUM_RESAMPLES = 10_000
AGAINST_ASHA = 2.0
MEASURED = ("freeze-thaw", "ASHA")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--half", choices=("judged", "tuning"), default="judged")
    options.add_argument("--orders", type=int, default=10, help="random orders for each table")
    args = options.parse_args()
    if args.quick:
        args.repeats, args.orders = 1, 2
    began = time.perf_counter()
    tables: dict[str, list[Table]] = {name: [] for name in (*SPACES, STEPS)}
    for workload in workloads(
        is_tuning=args.half == "tuning", seeds=args.repeats, quick=args.quick
    ):
        tables[workload.space_name].append(trained(workload))
        last = tables[workload.space_name][-1]
        print(
            f"{workload.name}, seed {workload.seed}: {len(last.curves)} configurations, "
            f"{workload.epochs} epochs, {last.unique_epochs:,} unique, {last.seconds:.0f} s",
            flush=True,
        )
    steps = tables.pop(STEPS)
    theirs, missing = peers()
    for library, reason in missing.items():
        print(f"{library} does not run: {reason}")
    figures: dict[str, Any] = {"missing peers": missing, "spaces": {}, "ended": {}, "measured": {}}
    goals: list[Goal] = []
    for name, here in tables.items():
        rows, ratio = compare(here, theirs, orders=args.orders)
        print(f"\n## {name}\n")
        table(rows)
        sys.stdout.flush()
        figures["spaces"][name] = rows
        goals.append(at_least(f"{name}: epochs of ASHA / freeze-thaw", ratio, AGAINST_ASHA))
    for name, here in tables.items():
        figures["ended"][name] = until_their_ends(here, orders=args.orders)
        print(f"\n## {name}: ended by themselves\n")
        table(figures["ended"][name])
        sys.stdout.flush()
    print("\n## Samplers that prefer to share training, on steps\n")
    figures["samplers"] = costs_of_sharing(steps, orders=args.orders)
    table(figures["samplers"])
    sys.stdout.flush()
    for name, here in tables.items():
        figures["measured"][name] = measured(here[0])
        print(f"\n## {name}: really trained\n")
        table(figures["measured"][name])
    figures["seconds"] = time.perf_counter() - began
    finish("schedules", figures, goals)


def compare(
    tables: Sequence[Table], theirs: Mapping[str, Search], *, orders: int
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each search, and the ratio of ASHA's epochs to those of freeze-thaw."""
    cases = [(one, order) for one in tables for order in range(orders)]
    num = len(tables[0].curves)
    names = list(algorithms(tables[0].workload.epochs, num))
    costs: dict[str, np.ndarray] = {}
    rows = []
    for name in [*names, *theirs]:
        row: dict[str, Any] = {"search": name}
        for regret in REGRETS:
            if name in theirs:
                found = [theirs[name](one, regret=regret, order=order) for one, order in cases]
                whole = [one.workload.epochs * num for one, _ in cases]
            else:
                found = [ours(name, one, regret=regret, order=order) for one, order in cases]
                whole = [one.unique_epochs for one, _ in cases]
            cost = _costs(found, whole)
            if regret == 0.0:
                costs[name] = cost
                low, high = _interval(cost)
                row |= {"epochs": cost.mean(), "95%": f"{low:,.0f} - {high:,.0f}"}
                row |= {"median": float(median(cost)), "found": mean(f.is_found for f in found)}
                row["ms a decision"] = mean(f.decisions_ms for f in found)
            else:
                row[f"regret {regret}"] = cost.mean()
        if name not in theirs:
            found = [
                ours(name, one, regret=0.0, order=order, workers=WORKERS) for one, order in cases
            ]
            row[f"seconds, {WORKERS} workers"] = mean(f.seconds for f in found)
            row[f"epochs, {WORKERS} workers"] = _costs(found, whole).mean()
        rows.append(row)
    for row in rows:
        ratio, low, high = _ratio(costs[row["search"]], costs["freeze-thaw"])
        row["/ freeze-thaw"] = f"{ratio:.2f} ({low:.2f} - {high:.2f})"
    return rows, float(costs["ASHA"].mean() / costs["freeze-thaw"].mean())


def until_their_ends(tables: Sequence[Table], *, orders: int) -> list[dict[str, Any]]:
    """Return what each algorithm of ours trains and finds with its own budget."""
    rows = []
    for name in OWN_BUDGETS:
        row: dict[str, Any] = {"search": name}
        for workers in (1, WORKERS):
            each = [
                ended(name, one, order=order, workers=workers)
                for one in tables
                for order in range(orders)
            ]
            regrets = np.array([e.regret for e in each])
            low, high = _interval(regrets)
            of = f"{workers} worker{'s' * (workers > 1)}"
            row[f"regret, {of}"] = f"{regrets.mean():.3f} ({low:.3f} - {high:.3f})"
            row[f"epochs, {of}"] = mean(e.epochs for e in each)
            row[f"seconds, {of}"] = mean(e.seconds for e in each)
        rows.append(row)
    return rows


def _costs(found: Sequence[Found], whole: Sequence[int]) -> np.ndarray:
    """Return the epochs of each search; one that ended without success costs the grid, too."""
    return np.array([
        f.epochs + (0 if f.is_found else epochs) for f, epochs in zip(found, whole, strict=True)
    ])


def _interval(values: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _ratio(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Return the ratio of means and its 95 % interval, by bootstrap over the same cases."""
    drawn = np.random.default_rng(0).integers(len(one), size=(NUM_RESAMPLES, len(one)))
    low, high = np.quantile(one[drawn].mean(axis=1) / other[drawn].mean(axis=1), [0.025, 0.975])
    return float(one.mean() / other.mean()), float(low), float(high)


def measured(one: Table) -> list[dict[str, Any]]:
    """Return seconds and epochs of real studies that end with the best of the grid."""
    workload = one.workload
    rows = []
    for name in MEASURED:
        algorithm = algorithms(workload.epochs, len(one.curves))[name]
        search = UntilFound(
            inner=algorithm, max_epochs=workload.epochs, target=-(one.target(0.0) + ROUNDING)
        )
        with tempfile.TemporaryDirectory() as folder:
            study = th.Study(
                workload.task,
                workload.space(0),
                algorithm=search,
                metric="loss",
                mode="min",
                storage=f"sqlite:///{folder}/study.db",
                name=name,
            )
            began = time.perf_counter()
            study.run(executor=th.Local(workers=1, threads=1), progress=False)
            rows.append({
                "search": name,
                "seconds": time.perf_counter() - began,
                "epochs": study.savings.unique_epochs,
                "regret": one.regret(study.best_trial.value),
            })
    rows.append({
        "search": "the whole grid, in memory",
        "seconds": one.seconds,
        "epochs": one.unique_epochs,
        "regret": 0.0,
    })
    return rows


if __name__ == "__main__":
    main()
