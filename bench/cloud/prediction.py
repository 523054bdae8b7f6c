"""Step times of jobs on clusters, predicted for held-out setups, and decisions by such forecasts.

The measurements are those of Pollux (OSDI 2021) and Sia (SOSP 2023): five applications on four
types of GPU. Measurements of one setup are averaged.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench.cloud.step_time_models import Boosting, Ernest, Paleo, Pollux
from bench.common.harness import data_file
from thrifty.perf.steptime import (
    Hybrid,
    Intervals,
    PerfectScaling,
    Setup,
    StepTimeModel,
    Transfer,
    smallest_margin,
)


Key = tuple[str, str]
"""Type of GPU, application."""

ERRATIC = ("azure", "imagenet")
"""The table whose job is bound by its input; its repetitions differ, too."""

BASELINES: Mapping[str, Callable[[], StepTimeModel]] = {
    "perfect scaling": PerfectScaling,
    "Ernest": Ernest,
    "Paleo": Paleo,
    "Pollux": Pollux,
    "boosting": Boosting,
}
OURS = "thrifty"
SEEDS = (10, 11, 12)
"""Seeds of held-out placements, other than those looked at while the models were made."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measurements of one application on one type of GPU."""

    key: Key
    setups: tuple[Setup, ...]
    step_s: np.ndarray
    noise: tuple[float, ...]

    def part(self, chosen: np.ndarray) -> tuple[list[Setup], np.ndarray]:
        """Return the setups and times of a mask."""
        return [self.setups[at] for at in np.flatnonzero(chosen)], self.step_s[chosen]


def one_thread() -> None:
    """Limit each process of the pool to one thread, as there is one process for each core.

    Libraries are imported first, because the limit would miss those that are loaded later.
    """
    import sklearn.ensemble  # noqa: F401, PLC0415

    threadpool_limits(1)


def tables() -> list[Table]:
    """Return the tables of all GPU types and applications."""
    found: dict[Key, dict[Setup, list[float]]] = defaultdict(lambda: defaultdict(list))
    path = data_file("systems", "sia_pollux", "measurements.csv")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            setup = Setup(placement=placement_of(row), batch=float(row["local_bsz"]))
            found[row["gpu"], row["app"]][setup].append(float(row["step_time"]))
    return [
        Table(
            key=key,
            setups=tuple(times),
            step_s=np.array([np.mean(each) for each in times.values()]),
            noise=tuple(
                abs(one / other - 1)
                for one, other in (each[:2] for each in times.values() if len(each) > 1)
            ),
        )
        for key, times in sorted(found.items())
    ]


def placement_of(row: Mapping[str, str]) -> tuple[int, ...]:
    """Return the placement as given, or spread evenly where the file only has numbers.

    Even spreading is what the schedulers of Pollux and Sia do.
    """
    digits = row["placement"].removesuffix(".0")
    if digits:
        return tuple(sorted(int(digit) for digit in digits))
    nodes, devices = int(float(row["num_nodes"])), int(float(row["num_replicas"]))
    each, more = divmod(devices, nodes)
    return tuple(sorted([each + 1] * more + [each] * (nodes - more)))


# -- what is held out ------------------------------------------------------------------------


def by_rows(table: Table, seed: int) -> np.ndarray:
    """Hold out a fifth of the measurements, a leaky split: their neighbours give them away."""
    return np.random.default_rng(seed).random(len(table.setups)) < 0.2


def by_placement(table: Table, seed: int, *, share: float = 0.2) -> np.ndarray:
    """Hold out a fifth of the placements.

    They are the same for all applications on a type of GPU, as nearly as each application has them.
    """
    placements = sorted({setup.placement for setup in table.setups if setup.num_devices > 1})
    held = {each for each in placements if np.random.default_rng([seed, *each]).random() < share}
    return np.array([setup.placement in held for setup in table.setups])


def by_scale(table: Table, _seed: int) -> np.ndarray:
    """Hold out setups with more than 8 devices."""
    return np.array([setup.num_devices > 8 for setup in table.setups])


def probes(table: Table) -> np.ndarray:
    """Return a mask of the probes that are known.

    These are one device at all batch sizes, and three more measurements: the corners of the
    placements up to 16 devices, at a middle batch.
    """
    setups = table.setups
    nodes = max(len(setup.placement) for setup in setups)
    full = max(setup.num_devices for setup in setups if len(setup.placement) == 1)
    few = min(nodes, 4)
    many = min(nodes, max(2, 16 // full))
    out = np.array([setup.num_devices == 1 for setup in setups])
    for placement in ((full,), (1,) * few, (full,) * many):
        there = [at for at, setup in enumerate(setups) if setup.placement == placement]
        there.sort(key=lambda at: setups[at].batch)
        out[there[len(there) // 2]] = True
    return out


# -- errors ----------------------------------------------------------------------------------


def percentage(guessed: np.ndarray, true: np.ndarray) -> float:
    """Return the mean absolute relative error, in %."""
    return 100 * float(np.mean(np.abs(guessed / true - 1)))


def error(model: StepTimeModel, table: Table, held: np.ndarray) -> float:
    """Return the mean absolute relative error of a model fitted to the rest, in %."""
    model.fit(*table.part(~held))
    setups, step_s = table.part(held)
    return percentage(model.predict(setups), step_s)


def of_split(job: tuple[Table, str, int, bool]) -> dict[str, Any]:
    """Evaluate all models on one table and, with ``intervals``, the coverage of our interval."""
    table, split, seed, intervals = job
    held = SPLITS[split](table, seed)
    models = {name: make() for name, make in BASELINES.items()}
    ours: Any = Intervals(Hybrid) if intervals else Hybrid()
    row: dict[str, Any] = {"key": table.key, "split": split, "seed": seed, "held": int(held.sum())}
    for name, model in {**models, OURS: ours}.items():
        row[name] = error(model, table, held)
    if intervals:
        setups, step_s = table.part(held)
        low, high = ours.interval(setups, coverage=0.9)
        row["covered"] = 100 * float(np.mean((low <= step_s) & (step_s <= high)))
        row["width"] = 100 * (float(np.mean(np.sqrt(high / low))) - 1)
    return row


SPLITS: Mapping[str, Callable[[Table, int], np.ndarray]] = {
    "random rows (leaky)": by_rows,
    "placement": by_placement,
    "<= 8 GPUs -> more": by_scale,
}


def of_probes(job: tuple[Table, str, Sequence[Table]]) -> dict[str, Any]:
    """Evaluate all models on a table known only by probes; ours also knows other tables."""
    table, split, others = job
    held = ~probes(table)
    same = 0 if split == "app" else 1
    references = [
        (other.setups, other.step_s)
        for other in others
        if other.key != table.key and other.key[same] == table.key[same]
    ]
    row: dict[str, Any] = {"key": table.key, "split": split, "held": int(held.sum())}
    for name, make in BASELINES.items():
        row[name] = error(make(), table, held)
    row[OURS] = error(Transfer(references), table, held)
    return row


def prediction(*, quick: bool) -> dict[str, Any]:
    """Return the errors of all splits and the coverage of intervals."""
    everything = tables()
    if quick:
        everything = [
            table for table in everything if table.key in {("dgx", "bert"), ("dgx", "imagenet")}
        ]
    seeds = SEEDS[:1] if quick else SEEDS
    jobs = [
        (table, split, seed, seed == SEEDS[0] and (split == "placement" or not quick))
        for split in SPLITS
        for seed in (seeds if split == "placement" else SEEDS[:1])
        for table in everything
    ]
    few = [(table, split, everything) for split in ("app", "gpu") for table in everything]
    if quick:
        few = [job for job in few if job[1] == "app"]
    with ProcessPoolExecutor(2, initializer=one_thread) as pool:
        rows = [*pool.map(of_split, jobs), *pool.map(of_probes, few)]
    noise = [100 * float(np.mean(table.noise)) for table in everything if table.noise]
    return {"rows": rows, "noise_floor": median(noise), "noise_pairs": len(noise)}


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean over tables."""
    return float(np.mean([row[name] for row in rows]))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each split, with means over tables.

    For our model the row also has the mean without the erratic table, and the median.
    """
    out = []
    for split in dict.fromkeys(row["split"] for row in rows):
        mine = [row for row in rows if row["split"] == split]
        line: dict[str, Any] = {"held out": split, "tables": len(mine)}
        for name in (*BASELINES, OURS):
            line[name] = mean_of(mine, name)
        line["median"] = median(row[OURS] for row in mine)
        calm = [row for row in mine if row["key"] != ERRATIC]
        line["without azure/imagenet"] = mean_of(calm, OURS)
        covered = [row for row in mine if "covered" in row]
        if covered:
            held = np.array([row["held"] for row in covered], float)
            line["in the 90 % interval"] = float(
                np.average([row["covered"] for row in covered], weights=held)
            )
        out.append(line)
    return out


def apps_won(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the unseen applications where ours beats every baseline, by the mean over GPUs."""
    won = []
    for app in sorted({row["key"][1] for row in rows}):
        mine = [row for row in rows if row["split"] == "app" and row["key"][1] == app]
        if mine and all(mean_of(mine, OURS) < mean_of(mine, name) for name in BASELINES):
            won.append(app)
    return won


# -- decisions -------------------------------------------------------------------------------


USD_H = {"aws": 0.978, "azure": 2.754, "dgx": 4.096, "rtx": 0.5}
"""Price of one GPU: list prices of g4dn.12xlarge, ND40rs v2 and p4d divided by their GPUs.

No cloud rents out the RTX 2080 Ti, so its price is a guess.
"""

RISK = 0.05
"""Risk of the 90 % setting: one decision in twenty is too expensive or too late.

That is the share beyond the upper end of a 90 % interval.
"""

KNOWN = 0.5
"""Share of the placements that were measured; decisions choose among the rest."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Setups of one application on all GPU types that were not measured.

    All values are per sample of the global batch.
    """

    total: np.ndarray
    guessed_s: np.ndarray
    upper_s: np.ndarray
    true_s: np.ndarray
    usd_s: np.ndarray


def known_and_not(job: tuple[Table, int]) -> tuple[Key, Sequence[dict[str, np.ndarray]]]:
    """Forecast what was not measured, and what was, by models that had not seen it."""
    table, seed = job
    held = by_placement(table, seed, share=1 - KNOWN)
    model = Intervals(Hybrid)
    known, known_s = table.part(~held)
    model.fit(known, known_s)
    setups, step_s = table.part(held)
    _, high = model.interval(setups, coverage=0.9)
    seen, guessed = model.held_out()
    return table.key, [
        _per_sample(table, setups, step_s, model.predict(setups), high),
        _per_sample(
            table,
            [known[at] for at in seen],
            known_s[seen],
            guessed,
            model.upper_held_out(coverage=0.9),
        ),
    ]


def _per_sample(
    table: Table,
    setups: Sequence[Setup],
    step_s: np.ndarray,
    guessed_s: np.ndarray,
    upper_s: np.ndarray,
) -> dict[str, np.ndarray]:
    devices = np.array([setup.num_devices for setup in setups], float)
    total = devices * np.array([setup.batch for setup in setups])
    return {
        "total": total,
        "guessed_s": guessed_s / total,
        "upper_s": upper_s / total,
        "true_s": step_s / total,
        "usd_s": devices * USD_H[table.key[0]] / 3600,
    }


def decisions(*, quick: bool, num: int = 600) -> dict[str, Any]:
    """Return choices for drawn deadlines and budgets, compared with the best in hindsight."""
    everything = tables()
    if quick:
        everything = [
            table
            for table in everything
            if table.key[1] in {"bert", "cifar10"} and table.key[0] in {"dgx", "rtx"}
        ]
        num = 40
    seeds = SEEDS[:1] if quick else SEEDS
    jobs = [(table, seed) for seed in seeds for table in everything]
    with ProcessPoolExecutor(2, initializer=one_thread) as pool:
        found = [
            (seed, *each)
            for (_, seed), each in zip(jobs, pool.map(known_and_not, jobs), strict=True)
        ]
    out: dict[str, Any] = {"rows": [], "rows with the whole interval": [], "margins": []}
    for seed in seeds:
        unknown, known = (
            {key: part[at] for each, key, part in found if each == seed} for at in (0, 1)
        )

        def missed(share: float, known: Any = known, seed: int = seed) -> list[float]:
            return [row["missed"] for row in _drawn(known, share, num=num, seed=100 + seed)]

        margin = smallest_margin(missed, risk=RISK)
        out["margins"].append(margin)
        out["rows"] += _drawn(unknown, margin, num=num, seed=seed)
        out["rows with the whole interval"] += _drawn(unknown, 1.0, num=num, seed=seed)
    return out


def _drawn(
    parts: Mapping[Key, Mapping[str, np.ndarray]], margin: float, *, num: int, seed: int
) -> list[dict[str, Any]]:
    """Return decisions for drawn limits, going through the applications in turn."""
    apps = sorted({app for _, app in parts})
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(num):
        app = apps[at % len(apps)]
        mine = [part for (_, each), part in parts.items() if each == app]
        options = Options(**{
            name: np.concatenate([part[name] for part in mine]) for name in mine[0]
        })
        rows.append(
            _decided(options, rng, app=app, deadline=bool(at // len(apps) % 2), margin=margin)
        )
    return rows


def _decided(
    options: Options, rng: np.random.Generator, *, app: str, deadline: bool, margin: float
) -> dict[str, Any]:
    """Make one choice: the cheapest for a deadline, or the fastest for a budget.

    A drawn limit bounds the global batch.
    """
    limit = float(np.exp(rng.uniform(*np.log(np.quantile(options.total, [0.1, 1.0])))))
    fits = options.total <= limit
    true = options.true_s[fits]
    upper = options.guessed_s[fits] + margin * (options.upper_s - options.guessed_s)[fits]
    cost, upper_cost = true * options.usd_s[fits], upper * options.usd_s[fits]
    aim, bound, bound_upper = (cost, true, upper) if deadline else (true, cost, upper_cost)
    ends = np.log([bound.min() * 1.1, bound.max()])
    cap = float(np.exp(rng.uniform(ends[0], max(ends))))
    allowed = bound_upper <= cap
    if not allowed.any():
        # No option meets the limit for certain: take the likeliest, and count it.
        allowed = bound_upper == bound_upper.min()
    guessed = options.guessed_s[fits] * (options.usd_s[fits] if deadline else 1.0)
    chosen = int(np.argmin(np.where(allowed, guessed, np.inf)))
    best = float(aim[bound <= cap].min())
    return {
        "app": app,
        "for": "deadline" if deadline else "budget",
        "ratio": float(aim[chosen] / best),
        "missed": bool(bound[chosen] > cap),
    }


def regret(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of all choices.

    A choice that misses its cap for less money is no bargain and counts as a ratio of 1.
    """
    ratios = np.array([max(1.0, row["ratio"]) for row in rows]) - 1
    out = {
        "choices": float(len(rows)),
        "median %": 100 * float(np.median(ratios)),
        "mean %": 100 * float(np.mean(ratios)),
    }
    for what in ("deadline", "budget"):
        mine = [row["missed"] for row in rows if row["for"] == what]
        out[f"{what}s missed %"] = 100 * float(np.mean(mine)) if mine else 0.0
    return out
