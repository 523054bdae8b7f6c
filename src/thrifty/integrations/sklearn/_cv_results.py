"""The results of a search, as scikit-learn's table of results."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import rankdata

from thrifty.study import Study

from ._param_space import ParamSpace


def results_table(
    study: Study, space: ParamSpace, *, num_splits: int, error_score: Any
) -> dict[str, Any]:
    """Return ``cv_results_``: columns by name, one row per trial."""
    trials = study.trials
    curves = [study._books().curve(trial.number) for trial in trials]
    params = [space.values(trial.config) for trial in trials]
    table: dict[str, Any] = {
        "params": params,
        "n_epochs": np.array([trial.epochs for trial in trials]),
        "state": np.array([trial.state for trial in trials]),
    }
    for name in space.space.names:
        table[f"param_{name}"] = _column(name, params)
    last = [
        curve[-1] if curve and trial.state != "failed" else {}
        for trial, curve in zip(trials, curves, strict=True)
    ]
    names = dict.fromkeys(n for metrics in last for n in metrics if not _is_of_split(n))
    for name in names:
        splits = np.array([
            [metrics.get(f"split{split}_{name}", error_score) for split in range(num_splits)]
            for metrics in last
        ])
        for split in range(num_splits):
            table[f"split{split}_test_{name}"] = splits[:, split]
        means = splits.mean(axis=1)
        table[f"mean_test_{name}"] = means
        table[f"std_test_{name}"] = splits.std(axis=1)
        # A configuration without a score ranks behind all others.
        behind = np.nan_to_num(means, nan=np.nanmin(means) - 1.0)
        table[f"rank_test_{name}"] = rankdata(-behind, method="min").astype(np.int32)
    return table


def _column(name: str, params: list[dict[str, Any]]) -> np.ma.MaskedArray[Any, Any]:
    """Return the values of a parameter, masked where a configuration does not have it."""
    column = np.ma.MaskedArray(np.empty(len(params), dtype=object), mask=True)
    for row, values in enumerate(params):
        if name in values:
            column[row] = values[name]
    return column


def _is_of_split(name: str) -> bool:
    return name.startswith("split") and name[5:].partition("_")[0].isdigit()
