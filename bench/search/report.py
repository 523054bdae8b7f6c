"""Tables from the regrets of all simulated searches.

They show means with intervals, ranks, and the race on held-out tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.search.curves import Task


SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the budget at which regrets are read."""
WORKERS = (1, 8, 32)
SETTINGS = (
    "1 worker, equal epochs",
    "1 worker, equal time",
    "8 workers, equal time",
    "32 workers, equal time",
)
NUM_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Measured:
    """One method.

    ``regrets[setting]`` is (tasks, repetitions, shares). ``utilisation`` and ``ms`` are (tasks,
    repetitions) by workers.
    """

    regrets: Mapping[str, np.ndarray]
    utilisation: Mapping[int, np.ndarray]
    ms: Mapping[int, np.ndarray]


def interval(by_task: np.ndarray) -> list[float]:
    """Return the central 95% of the bootstrapped means.

    Tasks are redrawn, with the mean over their repetitions.
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(len(by_task), size=(NUM_BOOTSTRAPS, len(by_task)))
    low, high = np.percentile(by_task[draws].mean(axis=1), [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]


def ranks(measured: Sequence[Measured], settings: Sequence[str]) -> np.ndarray:
    """Return the ranks (methods, tasks); 1 is the best, and ties share.

    A rank is the mean over settings of the rank of a task's mean regret at the end.
    """
    by_setting = []
    for setting in settings:
        means = np.array([m.regrets[setting][:, :, -1].mean(axis=1) for m in measured]).round(9)
        below = (means[:, None] > means[None]).sum(axis=1)
        same = (means[:, None] == means[None]).sum(axis=1)
        by_setting.append(below + (same + 1) / 2)
    return np.mean(by_setting, axis=0)


def setting_rows(
    names: Sequence[str], measured: Sequence[Measured], tasks: Sequence[Task], setting: str
) -> list[dict[str, Any]]:
    """Return one table: what each method reached in one setting."""
    families = np.array([task.family for task in tasks])
    num_workers = int(setting.split()[0])
    all_ranks = ranks(measured, [setting])
    rows = []
    for name, one, rank in zip(names, measured, all_ranks, strict=True):
        by_task = one.regrets[setting].mean(axis=1)
        row: dict[str, Any] = {"method": name}
        for i, share in enumerate(SHARES):
            row[f"regret at {share:.0%}"] = float(by_task[:, i].mean())
        row["95%"] = _range(interval(by_task[:, -1]))
        for family in dict.fromkeys(families):
            row[str(family)] = float(by_task[families == family, -1].mean())
        row["mean rank"] = float(rank.mean())
        row["rank 95%"] = _range(interval(rank))
        row["repetitions"] = one.regrets[setting].shape[1]
        row["utilisation"] = float(one.utilisation[num_workers].mean())
        row["ms a study"] = float(one.ms[num_workers].mean())
        rows.append(row)
    return sorted(rows, key=lambda row: row["mean rank"])


def rank_rows(
    names: Sequence[str], measured: Sequence[Measured], picked: np.ndarray
) -> list[dict[str, Any]]:
    """Return mean ranks over all settings on the tasks of a mask, best first."""
    settings = list(measured[0].regrets)
    all_ranks = ranks([_only(m, picked) for m in measured], settings)
    rows = []
    for name, one, rank in zip(names, measured, all_ranks, strict=True):
        ends = np.mean([one.regrets[s][picked, :, -1].mean(axis=1) for s in settings], axis=0)
        rows.append({
            "method": name,
            "mean rank": float(rank.mean()),
            "rank 95%": _range(interval(rank)),
            "mean regret": float(ends.mean()),
            "95%": _range(interval(ends)),
            "repetitions": one.regrets[settings[0]].shape[1],
        })
    return sorted(rows, key=lambda row: row["mean rank"])


def halves(tasks: Sequence[Task]) -> np.ndarray:
    """Return a mask of the tasks on which variants are chosen.

    They are judged on the other tasks. Every family is in both halves.
    """
    rng = np.random.default_rng(0)
    order: list[int] = []
    for family in dict.fromkeys(task.family for task in tasks):
        order += rng.permutation([i for i, t in enumerate(tasks) if t.family == family]).tolist()
    out = np.zeros(len(tasks), dtype=bool)
    out[order[::2]] = True
    return out


def _only(measured: Measured, picked: np.ndarray) -> Measured:
    regrets = {setting: values[picked] for setting, values in measured.regrets.items()}
    return Measured(regrets, measured.utilisation, measured.ms)


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} - {ends[1]:.3f}"
