"""Cost and duration of studies by the number of workers.

Shared stages are compared with one worker for each trial.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench._cluster_workloads import START_S, STATE_BYTES, Workload, epoch_seconds, studies
from bench._harness import Goal, table
from thrifty.study import Simulation, simulate


WORKERS = (1, 10, 20, 40, 100, 1000, 10_000)
HIPPO = {"one study": (4.81, 2.76), "several studies": (6.77, 3.53)}
"""Largest gains in the paper's abstract: GPU-hours, then end-to-end time.

They are relative to trial-based execution.
"""


def cost(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Return GPU-hours and hours by number of workers."""
    epoch_s, source = epoch_seconds()
    print(f"an epoch: {source}; a new assignment: {START_S:g} s (assumed)\n", flush=True)
    workers = (1, 20) if args.quick else WORKERS
    rows = [
        _row(workload, num, epoch_s)
        for workload in studies(quick=args.quick)
        for num in workers
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
