"""How well early scores predict later ones among the trials that ASHA lets go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.search.curves import MAX_EPOCHS, Task
from bench.search.measuring import limit
from bench.search.simulator import Job, OurSearch, simulate, study_seed
from thrifty.search import ASHA
from thrifty.search._checked_algorithms import MIN_TRIALS, rank_correlation


EARLY, LATE = 1, 9
PERCENTILES = (10, 50, 90)


def rung_orders(tasks: Sequence[Task], *, repeats: int) -> list[dict[str, Any]]:
    """Return percentiles of Kendall's tau between two rungs, by family.

    It is of the trials that have come to the later rung, as ``CheckedASHA`` sees them at the end of
    a study with one worker. Studies with fewer of them than it needs are left out.
    """
    found: dict[str, list[float]] = {}
    for task in tasks:
        for repeat in range(repeats):
            rows = _rows_at(task, repeat)
            if len(rows) >= MIN_TRIALS:
                curves = [task.curves[row] for row in rows]
                orders = [[curve[epoch - 1] for curve in curves] for epoch in (EARLY, LATE)]
                found.setdefault(task.family, []).append(rank_correlation(*orders))
    return [
        {"family": family, "studies": len(taus)}
        | {f"{p} %": float(np.percentile(taus, p)) for p in PERCENTILES}
        for family, taus in found.items()
    ]


def _rows_at(task: Task, repeat: int) -> list[int]:
    """Return the rows of the trials that come to the later rung and have a score there."""
    rows: list[int] = []

    def see(job: Job, *_: float) -> None:
        if job.stop == LATE and np.isfinite(task.curves[job.row][LATE - 1]):
            rows.append(job.row)

    algorithm = ASHA(max_epochs=MAX_EPOCHS, num_trials=100_000)
    searcher = OurSearch(algorithm, task, seed=study_seed(task, repeat))
    simulate(searcher, task, num_workers=1, limit=limit(1), on_job=see)
    return rows
