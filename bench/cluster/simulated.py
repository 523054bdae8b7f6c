"""Simulated clusters: cost by the number of workers, faults, and a large scale.

    python -m bench.cluster.simulated WORKLOAD [--quick]

simulates one workload at the large scale, in a process of its own. Is the scheduler near the bound,
and fast enough? *of the bound* is the least time that any scheduler could have taken for what was
trained (all work spread evenly over the workers, or the critical path), divided by the time it
took. The bound knows every decision in advance, which an algorithm that decides by results does
not.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.cluster.workloads import (
    START_S,
    STATE_BYTES,
    Workload,
    epoch_seconds,
    large,
    studies,
    unshareable,
)
from bench.common.harness import Part, at_least, at_most, equal, table
from bench.common.processes import in_fresh_process, say_result
from thrifty.run import Faults
from thrifty.study import Simulation, simulate


def play(workload: Workload, workers: int, epoch_s: Any, **options: Any) -> Simulation:
    """Simulate a workload on ``workers`` workers."""
    return simulate(
        workload.algorithms,
        workload.space,
        workers=workers,
        epoch_s=epoch_s,
        start_s=START_S,
        checkpoint_bytes=STATE_BYTES,
        **options,
    )


# -- cost: shared stages beside one worker for each trial --------------------------------


COST_WORKERS = (1, 10, 20, 40, 100, 1000, 10_000)
HIPPO = {"one study": (4.81, 2.76), "several studies": (6.77, 3.53)}
"""Largest gains in the paper's abstract: GPU-hours, then end-to-end time.

They are relative to trial-based execution.
"""


def cost(args: argparse.Namespace) -> Part:
    """Return GPU-hours and hours by number of workers."""
    epoch_s, source = epoch_seconds()
    print(f"an epoch: {source}; a new assignment: {START_S:g} s (assumed)\n", flush=True)
    workers = (1, 20) if args.quick else COST_WORKERS
    rows = [
        _row(workload, num, epoch_s) for workload in studies(quick=args.quick) for num in workers
    ]
    table(rows)
    print(
        "\nASHA decides by what is known at the moment, so with stages shared it tries and "
        "promotes others; "
        "halving and grid train for the same trials either way."
    )
    print("\nHippo (PVLDB 2022, abstract), at most; its own spaces, models and GPUs\n")
    hippo = [
        {"": name, "GPU-hours, times less": less, "end to end, times shorter": shorter}
        for name, (less, shorter) in HIPPO.items()
    ]
    table(hippo)
    return {"epochs": source, "rows": rows, "hippo": hippo}, []


def _row(workload: Workload, workers: int, epoch_s: Any) -> dict[str, Any]:
    shared, alone = (play(workload, workers, epoch_s, share=share) for share in (True, False))
    return {
        "workload": workload.name,
        "workers": workers,
        "trials": shared.num_trials,
        "trial-epochs alone": alone.trial_epochs,
        "trial-epochs shared": shared.trial_epochs,
        "epochs shared": shared.unique_epochs,
        "GPU-h alone": alone.busy_s / 3600,
        "GPU-h shared": shared.busy_s / 3600,
        "times less": alone.busy_s / shared.busy_s,
        "hours alone": alone.end_to_end_s / 3600,
        "hours shared": shared.end_to_end_s / 3600,
        "times shorter": alone.end_to_end_s / shared.end_to_end_s,
        "of the bound": shared.efficiency,
    }


# -- faults: workers that fail, straggle and are preempted -------------------------------


HOUR_S = 3600.0
FAULT_WORKERS = 40
SPOT = {"mean_between_preemptions_s": 4 * HOUR_S, "replace_s": 300.0}
FAULTS = {
    "none": Faults(),
    "a failure a day": Faults(mean_between_failures_s=24 * HOUR_S, repair_s=600.0),
    "a failure in 4 h": Faults(mean_between_failures_s=4 * HOUR_S, repair_s=600.0),
    "5 % stragglers, 3 times as slow": Faults(stragglers=0.05, slowdown=3.0),
    "spot, taken every 4 h at once": Faults(**SPOT),
    "spot, taken every 4 h, 2 min notice": Faults(**SPOT, notice_s=120.0),
    "all of this": Faults(
        mean_between_failures_s=24 * HOUR_S,
        repair_s=600.0,
        stragglers=0.05,
        slowdown=3.0,
        notice_s=120.0,
        **SPOT,
    ),
}


def faults(args: argparse.Namespace) -> Part:
    """Return the cost of faults, with stages shared and without."""
    epoch_s, _ = epoch_seconds()
    workload = studies(quick=args.quick)[0]
    rows = []
    for share in (True, False):
        for name, trouble in FAULTS.items():
            found = play(workload, FAULT_WORKERS, epoch_s, share=share, faults=trouble)
            rows.append({
                "faults": name,
                "stages": "shared" if share else "alone",
                "GPU-h": found.busy_s / 3600,
                "hours": found.end_to_end_s / 3600,
                "failures": found.failures,
                "preemptions": found.preemptions,
                "epochs": found.unique_epochs,
                "again": found.epochs_redone,
                "trials given up": found.num_failed,
                "best": found.best_value,
            })
    print(f"{workload.name}, {FAULT_WORKERS} workers\n")
    table(rows)
    shared = [row for row in rows if row["stages"] == "shared"]
    same = sum(row["best"] == rows[0]["best"] for row in shared if not row["trials given up"])
    whole = sum(not row["trials given up"] for row in shared)
    return {"rows": rows}, [
        equal("runs without trials given up, same best as without faults", same, whole)
    ]


# -- scale: a thousand workers and a hundred thousand trials -----------------------------


SCALE_WORKERS, SCALE_TRIALS = 1000, 100_000
QUICK_WORKERS, QUICK_TRIALS = 20, 1000


def scale(args: argparse.Namespace) -> Part:
    """Run each workload once in a process of its own, as a run has a hundred thousand decisions."""
    names = [workload.name for workload in _workloads(10)]
    size = ["--quick"] if args.quick else []
    rows = [in_fresh_process("bench.cluster.simulated", name, *size) for name in names]
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
    workers, trials = (QUICK_WORKERS, QUICK_TRIALS) if args.quick else (SCALE_WORKERS, SCALE_TRIALS)
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
