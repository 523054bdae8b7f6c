"""The standard run of ``bench_search``: what one would ask about ``Auto``.

``Auto``, other algorithms of ours and peers search the judged tasks, with 1, 8 and 32 workers. Each
figure is given at equal epochs and at equal seconds of the simulated cluster. Slow methods get
fewer repetitions, and the slowest ones a few tasks, spread over all: each of those is compared with
what the others find on its own tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from bench.common.harness import Goal, at_most
from bench.search.curves import Task
from bench.search.measuring import Measurement, Unit
from bench.search.report import SHARES, WORKERS, interval


AUTO = "Auto"
REPEATS = 4
CLOSE = 0.02
"""How far ``Auto`` may be behind the best of a family of tasks."""
MEASURES = ("epochs", "seconds")


class Effort(NamedTuple):
    """Repetitions, and on how many tasks (None: all)."""

    repeats: int
    num_tasks: int | None = None


def once(num_tasks: int | None = None) -> Effort:
    return Effort(1, num_tasks)


FULL = Effort(REPEATS)
EFFORTS: dict[str, tuple[Effort, Effort, Effort]] = {
    AUTO: (FULL, FULL, FULL),
    "checked ASHA": (FULL, FULL, FULL),
    "ASHA": (FULL, FULL, FULL),
    "BOSS KDE, widest": (FULL, FULL, FULL),
    "SS asynchronous": (FULL, FULL, FULL),
    "published BOSS": (FULL, FULL, FULL),
    "Hyperband": (FULL, FULL, FULL),
    "random search": (FULL, FULL, FULL),
    "Syne Tune ASHA": (FULL, FULL, FULL),
    "Syne Tune Hyperband": (FULL, FULL, FULL),
    "Optuna TPE + Hyperband": (Effort(2), Effort(2), once()),
    "freeze-thaw": (once(), once(), once(4)),
    "Optuna GP": (once(12), once(), once(3)),
    "SMAC3 Hyperband": (once(7), once(7), once(3)),
    "Syne Tune MOBSTER": (once(4), once(4), once(0)),
    "Syne Tune DyHPO": (once(3), once(3), once(0)),
}
"""What each method gets with 1, 8 and 32 workers, the slowest last.

A study of MOBSTER or DyHPO with 32 workers would take minutes.
"""


class Regrets(NamedTuple):
    """The regrets of a method in one setting: (tasks, repetitions, shares of the budget)."""

    tasks: tuple[int, ...]
    values: np.ndarray
    ms: float

    def on(self, tasks: Sequence[int]) -> Regrets:
        """Return the regrets on some of the tasks."""
        rows = [self.tasks.index(task) for task in tasks]
        return Regrets(tuple(tasks), self.values[rows], self.ms)

    @property
    def means(self) -> np.ndarray:
        """The mean over repetitions: (tasks, shares)."""
        mean: np.ndarray = self.values.mean(axis=1)
        return mean


ByMethod = dict[str, Regrets]


def units(
    names: Iterable[str],
    tasks: Sequence[Task],
    *,
    most: int | None = None,
    repetitions: int = REPEATS,
    workers: Sequence[int] = WORKERS,
) -> list[Unit]:
    """Return the units of all methods, those that take longest first.

    Args:
        names: The methods that can run.
        tasks: The tasks.
        most: Most repetitions of any method.
        repetitions: Repetitions of methods that are not slow.
        workers: The numbers of workers.
    """
    known, out = list(names), []
    for method in sorted(known, key=_slowness, reverse=True):
        efforts = EFFORTS.get(method, (FULL, FULL, FULL))
        for num_workers, effort in reversed(list(zip(WORKERS, efforts, strict=True))):
            repeats = repetitions if effort == FULL else effort.repeats
            if most is not None:
                repeats = min(repeats, most)
            if repeats and num_workers in workers:
                picked = spread(len(tasks), effort.num_tasks)
                out += [Unit(method, num_workers, t, repeats, in_epochs=True) for t in picked]
    return out


def _slowness(method: str) -> int:
    return list(EFFORTS).index(method) if method in EFFORTS else 0


def spread(total: int, num: int | None) -> list[int]:
    """Return ``num`` of ``total`` numbers, evenly spread (None: all).

    >>> spread(46, 4), spread(3, None), spread(3, 7)
    ([5, 17, 28, 40], [0, 1, 2], [0, 1, 2])
    """
    if num is None or num >= total:
        return list(range(total))
    return [int((at + 0.5) * total / num) for at in range(num)]


def by_setting(found: Sequence[Measurement]) -> dict[str, ByMethod]:
    """Return the regrets of all methods by setting."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for one in sorted(found, key=lambda m: m.unit.task):
        groups.setdefault((one.unit.method, one.unit.num_workers), []).append(one)
    out: dict[str, ByMethod] = {}
    for num_workers, measure in product(WORKERS, MEASURES):
        if not any(w == num_workers for _, w in groups):
            continue
        plural = "worker" if num_workers == 1 else "workers"
        here = out.setdefault(f"{num_workers} {plural}, {measure}", {})
        for method in dict.fromkeys([*EFFORTS, *(method for method, _ in groups)]):
            group = groups.get((method, num_workers))
            if group:
                arrays = [m.by_epochs if measure == "epochs" else m.by_time for m in group]
                numbers = tuple(m.unit.task for m in group)
                ms = float(np.mean([m.ms.mean() for m in group]))
                here[method] = Regrets(numbers, np.stack(arrays), ms)
    return out


def on_all_tasks(here: ByMethod) -> ByMethod:
    """Return the methods that searched every task that ``Auto`` searched."""
    return {name: r for name, r in here.items() if r.tasks == here[AUTO].tasks}


def on_few_tasks(here: ByMethod) -> dict[str, ByMethod]:
    """Return by slow method: itself and the methods with all tasks, on its own tasks."""
    fast = on_all_tasks(here)
    return {
        name: {other: r.on(slow.tasks) for other, r in fast.items()} | {name: slow}
        for name, slow in here.items()
        if name not in fast
    }


def single_ranks(methods: Sequence[Regrets]) -> np.ndarray:
    """Return ranks at the end (methods, tasks), as means over ranks of single studies.

    1 is the best, and ties share. The repetitions of a method that has fewer than another one are
    used several times, so that no method is ranked by a mean of more studies than another.
    """
    most = max(r.values.shape[1] for r in methods)
    total = np.zeros((len(methods), len(methods[0].tasks)))
    for repeat in range(most):
        ends = np.array([r.values[:, repeat % r.values.shape[1], -1] for r in methods]).round(9)
        below = (ends[:, None] > ends[None]).sum(axis=1)
        same = (ends[:, None] == ends[None]).sum(axis=1)
        total += below + (same + 1) / 2
    return total / most


def rows(here: ByMethod, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return the table of one setting; all methods have the same tasks.

    ``minus Auto`` is the difference of mean regrets at the end, paired by task.
    """
    numbers = here[AUTO].tasks
    ranks = dict(zip(here, single_ranks(list(here.values())), strict=True))
    is_real = np.array([not tasks[number].is_made_up for number in numbers])
    is_crossing = np.array([tasks[number].family.endswith("crossing") for number in numbers])
    out = []
    for name, regrets in here.items():
        means = regrets.means
        row: dict[str, Any] = {"method": name}
        for at, share in enumerate(SHARES):
            row[f"{share:.0%}"] = float(means[:, at].mean())
        row["95%"] = _range(interval(means[:, -1]))
        row["real"] = float(means[is_real, -1].mean()) if is_real.any() else None
        row["crossing"] = float(means[is_crossing, -1].mean()) if is_crossing.any() else None
        row["mean rank"] = float(ranks[name].mean())
        row["rank 95%"] = _range(interval(ranks[name]))
        if name != AUTO:
            difference = means[:, -1] - here[AUTO].means[:, -1]
            row["minus Auto"] = float(difference.mean())
            row["minus Auto, 95%"] = _range(interval(difference))
        row["repetitions"] = regrets.values.shape[1]
        row["ms a study"] = regrets.ms
        out.append(row)
    columns = [key for key in out[0] if key not in {"repetitions", "ms a study"}]
    columns += ["minus Auto", "minus Auto, 95%", "repetitions", "ms a study"]
    ordered = [{key: row.get(key) for key in columns} for row in out]
    return sorted(ordered, key=lambda row: float(row["mean rank"]))


def difference_rows(here: ByMethod, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return how far each method is from ``Auto`` by group of tasks, at all shares of the budget.

    Each cell is the mean difference, paired by task, with its interval.
    """
    numbers = here[AUTO].tasks
    is_real = np.array([not tasks[number].is_made_up for number in numbers])
    is_crossing = np.array([tasks[number].family.endswith("crossing") for number in numbers])
    groups = {
        "real": is_real,
        "crossing": is_crossing,
        "other made up": ~is_real & ~is_crossing,
        "all": np.ones_like(is_real),
    }
    out = []
    for name, regrets in here.items():
        if name == AUTO:
            continue
        for group, picked in groups.items():
            if not picked.any():
                continue
            row: dict[str, Any] = {"minus Auto": name, "tasks": f"{picked.sum()} {group}"}
            for at, share in enumerate(SHARES):
                difference = (regrets.means - here[AUTO].means)[picked, at]
                row[f"{share:.0%}"] = f"{difference.mean():.3f} ({_range(interval(difference))})"
            out.append(row)
    return out


def slow_rows(slow: Mapping[str, ByMethod], setting: str) -> list[dict[str, Any]]:
    """Return rows that compare each slow method with ``Auto`` on the tasks of the slow method."""
    out = []
    for name, here in slow.items():
        ranks = dict(zip(here, single_ranks(list(here.values())), strict=True))
        row: dict[str, Any] = {"setting": setting, "method": name, "tasks": len(here[name].tasks)}
        for at, share in enumerate(SHARES):
            row[f"{share:.0%}"] = float(here[name].means[:, at].mean())
        row["Auto"] = float(here[AUTO].means[:, -1].mean())
        difference = here[name].means[:, -1] - here[AUTO].means[:, -1]
        row["minus Auto"] = float(difference.mean())
        row["minus Auto, 95%"] = _range(interval(difference))
        row["mean rank"] = float(ranks[name].mean())
        row["Auto's rank"] = float(ranks[AUTO].mean())
        row["repetitions"] = here[name].values.shape[1]
        row["ms a study"] = here[name].ms
        out.append(row)
    return out


class Lead(NamedTuple):
    """By how much another method is surely ahead of ``Auto``, where it is most so.

    ``amount`` is the lower end of the 95 % interval of the paired difference, so a negative one
    says that no method is surely ahead.
    """

    amount: float
    method: str
    share: float


def lead(here: ByMethod, picked: np.ndarray) -> Lead:
    """Return the largest sure lead of another method, at any share, on the tasks of a mask."""
    auto = here[AUTO].means[picked]
    found = [
        Lead(interval(auto[:, at] - regrets.means[picked, at])[0], name, share)
        for name, regrets in here.items()
        if name != AUTO
        for at, share in enumerate(SHARES)
    ]
    return max(found)


def rank_lead(here: ByMethod) -> Lead:
    """Return the largest sure lead of another method in mean rank, at the end."""
    ranks = dict(zip(here, single_ranks(list(here.values())), strict=True))
    found = [
        Lead(interval(ranks[AUTO] - rank)[0], name, 1.0)
        for name, rank in ranks.items()
        if name != AUTO
    ]
    return max(found)


def slow_lead(slow: Mapping[str, ByMethod]) -> Lead | None:
    """Return the largest sure lead of a slow method at the end, on its own tasks."""
    found = [
        Lead(interval(here[AUTO].means[:, -1] - here[name].means[:, -1])[0], name, 1.0)
        for name, here in slow.items()
    ]
    return max(found, default=None)


class Gap(NamedTuple):
    """How far ``Auto`` is behind the best method of a family, with an interval."""

    amount: float
    interval: str
    best: str


def gaps(here: ByMethod, tasks: Sequence[Task]) -> dict[str, Gap]:
    """Return the gap of ``Auto`` at the end by family."""
    families = np.array([tasks[number].family for number in here[AUTO].tasks])
    out = {}
    for family in dict.fromkeys(families.tolist()):
        ends = {name: r.means[families == family, -1] for name, r in here.items()}
        best = min(ends, key=lambda name: float(ends[name].mean()))
        difference = ends[AUTO] - ends[best]
        out[family] = Gap(float(difference.mean()), _range(interval(difference)), best)
    return out


def gap_rows(by_setting: Mapping[str, Mapping[str, Gap]]) -> list[dict[str, Any]]:
    """Return a table: settings by family, with the best method where ``Auto`` is behind."""
    families = list(next(iter(by_setting.values())))
    return [
        {"setting": setting} | {family: _gap_text(found[family]) for family in families}
        for setting, found in by_setting.items()
    ]


def _gap_text(gap: Gap) -> str:
    if gap.best == AUTO:
        return "0"
    return f"{gap.amount:.3f} ({gap.interval}) {gap.best}"


def goals(settings: Mapping[str, ByMethod], tasks: Sequence[Task]) -> list[Goal]:
    """Return the goals: ``Auto`` first or tied in each setting, and close in each family."""
    out = []
    for setting, methods in settings.items():
        here = on_all_tasks(methods)
        is_real = np.array([not tasks[number].is_made_up for number in here[AUTO].tasks])
        for which, picked in (("real tasks", is_real), ("all tasks", np.ones_like(is_real))):
            if picked.any():
                most = lead(here, picked)
                out.append(at_most(f"{setting}, {which}: {_lead_text(most)}", most.amount, 0))
        most = rank_lead(here)
        name = f"{setting}, all tasks: sure lead in mean rank over Auto ({most.method})"
        out.append(at_most(name, most.amount, 0))
        if slow := slow_lead(on_few_tasks(methods)):
            name = f"{setting}, a few tasks: sure lead over Auto (slow methods: {slow.method})"
            out.append(at_most(name, slow.amount, 0))
    found = {setting: gaps(on_all_tasks(here), tasks) for setting, here in settings.items()}
    for family in next(iter(found.values())):
        setting = max(found, key=lambda setting: found[setting][family].amount)
        gap = found[setting][family]
        name = f"{family}: Auto's gap to the best ({gap.best}; {setting})"
        out.append(at_most(name, gap.amount, CLOSE))
    return out


def _lead_text(most: Lead) -> str:
    return f"sure lead over Auto ({most.method}, at {most.share:.0%})"


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} - {ends[1]:.3f}"
