"""One study of schedules on 40 workers that fail, straggle and are preempted."""

from __future__ import annotations

import argparse
from typing import Any

from bench._cluster_cost import play
from bench._cluster_workloads import epoch_seconds, studies
from bench._harness import Goal, equal, table
from thrifty.run import Faults


HOUR_S = 3600.0
WORKERS = 40
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


def faults(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Return the cost of faults, with stages shared and without."""
    epoch_s, _ = epoch_seconds()
    workload = studies(quick=args.quick)[0]
    rows = []
    for share in (True, False):
        for name, trouble in FAULTS.items():
            found = play(workload, WORKERS, epoch_s, share=share, faults=trouble)
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
    print(f"{workload.name}, {WORKERS} workers\n")
    table(rows)
    shared = [row for row in rows if row["stages"] == "shared"]
    same = sum(row["best"] == rows[0]["best"] for row in shared if not row["trials given up"])
    whole = sum(not row["trials given up"] for row in shared)
    return {"rows": rows}, [
        equal("runs without trials given up, same best as without faults", same, whole)
    ]
