"""Samplers that prefer configurations that share training: what that costs and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import thrifty as th
from bench.schedules.searches import Ended, until_its_end
from bench.schedules.workloads import Table
from thrifty.search import Algorithm, Sampler


NUM_TRIALS = {"RandomSearch": 30, "ASHA": 60}
"""Trials of a study, of 144 configurations."""
NUM_RESAMPLES = 10_000

SAMPLERS: dict[str, dict[float, Sampler]] = {
    "random": {0: th.RandomSampler()},
    "KDE": {s: th.KDESampler(share=s) for s in (0.0, 0.05, 0.25, 1.0)},
    "random forest": {s: th.RandomForestSampler(share=s) for s in (0.0, 0.05, 0.25, 1.0)},
    "TPE": {s: th.TPESampler(share=s) for s in (0, 1, 4, 16)},
}
"""Samplers by name, and by what they give up for sharing."""


def costs_of_sharing(tables: Sequence[Table], *, orders: int) -> list[dict[str, Any]]:
    """Return a row for each algorithm and sampler, in pairs with the same sampler at ``share=0``.

    Args:
        tables: The learning curves of a space, for some seeds of the network's first weights.
        orders: Number of studies for each table.
    """
    rows = []
    for name in NUM_TRIALS:
        for sampler_name, samplers in SAMPLERS.items():
            alone: list[Ended] = []
            for share, sampler in samplers.items():
                each = [
                    until_its_end(_algorithm(name, one, sampler), one, order=order)
                    for one in tables
                    for order in range(orders)
                ]
                alone = alone or each
                regrets = np.array([e.regret for e in each])
                epochs = np.array([e.epochs for e in each])
                row = {"algorithm": name, "sampler": sampler_name, "share": share}
                row |= {"regret": float(regrets.mean()), "epochs": float(epochs.mean())}
                more = _interval(regrets - [e.regret for e in alone])
                less = _interval(1.0 - epochs / [e.epochs for e in alone])
                row["more regret"] = "{:.3f} ({:.3f} - {:.3f})".format(*more)
                row["epochs saved"] = "{:.1%} ({:.1%} - {:.1%})".format(*less)
                rows.append(row)
    return rows


def _algorithm(name: str, table: Table, sampler: Sampler) -> Algorithm:
    options: dict[str, Any] = {"max_epochs": table.workload.epochs, "num_trials": NUM_TRIALS[name]}
    return (
        th.ASHA(**options, sampler=sampler)
        if name == "ASHA"
        else th.RandomSearch(**options, sampler=sampler)
    )


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval, by bootstrap."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
