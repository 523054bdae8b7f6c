"""Simulation of a thousand workers and a hundred thousand trials.

Is the scheduler near the bound, and fast enough?

*of the bound* is the least time that any scheduler could have taken for what was trained (all work
spread evenly over the workers, or the critical path), divided by the time it took. The bound knows
every decision in advance, which an algorithm that decides by results does not.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench._cluster_cost import play
from bench._cluster_workloads import START_S, epoch_seconds, large, unshareable
from bench._harness import Goal, at_least, at_most, in_fresh_process, say_result, table


WORKERS, TRIALS = 1000, 100_000
QUICK_WORKERS, QUICK_TRIALS = 20, 1000


def scale(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Run each workload once in a process of its own, as a run has a hundred thousand decisions."""
    names = [workload.name for workload in _workloads(10)]
    size = ["--quick"] if args.quick else []
    rows = [in_fresh_process("bench._cluster_scale", name, *size) for name in names]
    table(rows)
    print(
        "\nthe bound knows every decision in advance and no loading of states; "
        f"a worker loads one in {START_S:g} s (assumed), which counts as busy"
    )
    by = {row["workload"]: row for row in rows}
    goals = []
    for name in names:
        goals += [
            at_least(f"{name}: utilisation", by[name]["utilisation"], 0.95),
            at_least(f"{name}: of the bound", by[name]["of the bound"], 0.95),
            at_most(f"{name}: a decision in ms, p99", by[name]["decision ms p99"], 10),
        ]
    return {"rows": rows}, goals


def _workloads(num_trials: int) -> list[Any]:
    return [*large(num_trials), unshareable(num_trials)]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("name")
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    workers, trials = (QUICK_WORKERS, QUICK_TRIALS) if args.quick else (WORKERS, TRIALS)
    workload = next(w for w in _workloads(trials) if w.name == args.name)
    found = play(workload, workers, epoch_seconds()[0])
    times = found.decision_s
    say_result({
        "workload": workload.name,
        "workers": workers,
        "trials": found.num_trials,
        "trial-epochs": found.trial_epochs,
        "epochs": found.unique_epochs,
        "hours": found.end_to_end_s / 3600,
        "utilisation": found.utilisation,
        "of the bound": found.efficiency,
        "driver s": found.driver_s,
        "us an epoch": 1e6 * found.driver_s / max(found.unique_epochs, 1),
        "decisions": times.num,
        "decision ms median": times.median * 1e3,
        "decision ms p99": times.p99 * 1e3,
        "decision ms max": times.max * 1e3,
    })


if __name__ == "__main__":
    main()
