"""Search algorithms on tables of real learning curves: regret at equal epochs and at equal time.

    python -m bench.bench_search --standard [--quick] [--kept FILE] [--half tuning]
        [--methods "Auto;ASHA"] [--workers 1] [--repetitions 10]
    python -m bench.bench_search --rates [--quick] [--repeats 10]
    python -m bench.bench_search [--quick] [--repeats 50] [--kept FILE]

``--standard`` takes ten minutes in two processes on two free cores, with all peers installed.
It compares ``Auto``, other algorithms of ours and peers on the judged tasks, at equal epochs and at
equal time with 1, 8 and 32 workers (see ``bench.search.standard``). With ``--half tuning`` it runs
the tasks on which options may be chosen, with ``--methods`` some of the methods, with ``--workers``
some numbers of workers, and with ``--repetitions`` more repetitions of methods that are not slow.

``--rates`` takes half a minute. It trains 36 tasks with a learning rate as their only
hyper-parameter (``bench.search.rate_tasks``), and compares ``Auto`` with 8 workers there with a
sampler that learns.

Without these options, the bench compares more of our methods on all tasks, for a night. This and
``--standard`` keep what they measure in a file, if ``--kept`` names one, and go on from it.

There are 61 tasks (TaskSet 9, DeepOBS 18, LCBench's surrogate 34), with 27 epochs at most and 1, 8
and 32 workers. The time is simulated. The budget is one pass of Hyperband (357 epochs) with one
worker. With 8 and 32 workers it is the time in which 8 busy ones would train that. With 32 workers,
four times as much is trained, and methods with a fixed number of trials get four times as many.
Where a study ends early, a new one follows. All training is charged, also for rows that were
trained before; a paused trial is not trained twice.

*Regret* is of the trial with the best score at the largest epoch that any has reached: 0 is the
best fully trained row of the pool, 1 the median of those that did not diverge, or worse. Intervals
are by bootstrap over tasks. DeepOBS has no validation split, so there test losses both choose and
judge. TaskSet and DeepOBS have no times: a row's epoch takes a lognormal time (sigma 0.5) drawn
once. The variant of BOSS that takes part is chosen beforehand on half of the tasks. Samplers that
take several milliseconds for a draw may be given fewer repetitions (``--slow-repeats``). Peers have
fewer repetitions and fewer tasks; the tables say how many.

Sixteen made-up tasks have tables of their own: curves that cross, drop late, diverge or are noisy.
Freeze-thaw has two repetitions, as each of its decisions takes tens of milliseconds. For it,
the bench also reports how often intervals of its model hold later scores, and the
time of a decision after 100 to 100,000 trials.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common.harness import Goal, at_least, at_most, finish, parser, table
from bench.search import standard
from bench.search.curve_forecasts import NUMS, calibration, decision_times
from bench.search.curves import Task, load
from bench.search.made_up_curves import made_up
from bench.search.measuring import Kept, MeasureAll, Measurement, Unit, measuring
from bench.search.methods import (
    Method,
    auto_variants,
    boss_variants,
    methods,
    pass_epochs,
    quicken_optuna,
)
from bench.search.peers import Peer, peers
from bench.search.rate_tasks import rate_tasks
from bench.search.report import (
    SETTINGS,
    SHARES,
    WORKERS,
    Measured,
    halves,
    interval,
    rank_rows,
    setting_rows,
)
from bench.search.rung_orders import rung_orders


SLOW_REPEATS = 50
PEER_REPEATS, PEER_EVERY = 2, 5
RACE_REPEATS, RACE_WORKERS = 5, 8
MOST_SECONDS = 8 * 3600
"""For the whole bench: a night."""
MOST_SECONDS_OF_STANDARD = 1200
FORECAST_REPEATS = 4
RATE_REPEATS = 10
MOST_SECONDS_OF_A_DECISION = {1_000: 0.2, 100_000: 1.0}


class Effort(NamedTuple):
    """Number of repetitions, and the stride over tasks."""

    repeats: int
    every: int


def collect(
    names: Sequence[str], found: Sequence[Measurement], *, workers: Sequence[int] = WORKERS
) -> list[Measured]:
    """Collect measurements by method, tasks in order."""
    out = []
    for name in names:
        by_workers = {
            w: sorted(
                (m for m in found if m.unit.method == name and m.unit.num_workers == w),
                key=lambda m: m.unit.task,
            )
            for w in workers
        }
        regrets = {}
        if 1 in workers:
            regrets[SETTINGS[0]] = np.stack([m.by_epochs for m in by_workers[1]])
        for setting, w in zip(SETTINGS[1:], WORKERS, strict=True):
            if w in workers:
                regrets[setting] = np.stack([m.by_time for m in by_workers[w]])
        utilisation = {w: np.stack([m.utilisation for m in by_workers[w]]) for w in workers}
        ms = {w: np.stack([m.ms for m in by_workers[w]]) for w in workers}
        out.append(Measured(regrets, utilisation, ms))
    return out


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=50)
    options.add_argument("--standard", action="store_true", help="Auto beside peers, on one half")
    options.add_argument("--rates", action="store_true", help="tasks of one hyper-parameter")
    options.add_argument("--half", choices=("judged", "tuning"), default="judged")
    options.add_argument("--methods", help="with --standard: only these, separated by semicolons")
    options.add_argument(
        "--workers", type=int, nargs="+", choices=WORKERS, default=WORKERS, help="with --standard"
    )
    options.add_argument(
        "--repetitions",
        type=int,
        default=standard.REPEATS,
        help="with --standard: runs of methods that are not slow",
    )
    options.add_argument("--kept", type=Path, help="file that keeps what is measured, to go on")
    options.add_argument(
        "--slow-repeats", type=int, default=SLOW_REPEATS, help="runs of methods with a slow sampler"
    )
    options.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = options.parse_args()
    warnings.filterwarnings("ignore")  # peers announce experimental features thousands of times
    quicken_optuna()
    if args.rates:
        run_rates(args)
    elif args.standard:
        run_standard(args)
    else:
        run_whole(args)


def run_standard(args: argparse.Namespace) -> None:
    """Run ``Auto``, other algorithms of ours and peers on one half of the tasks."""
    began = time.perf_counter()
    is_judged = args.half == "judged"
    real = load()
    first = halves(real)
    tasks = [task for task, is_first in zip(real, first, strict=True) if is_first != is_judged]
    extra = made_up(judged=is_judged)
    theirs, missing = peers()
    names = named(args.methods, theirs)
    most = None
    if args.quick:
        tasks, extra, most = [tasks[0], tasks[-1]], extra[:1], 1
        slow = [peer.name for peer in theirs if peer.slow]
        names = [name for name in names if name not in slow]
    num = len(tasks)
    tasks += extra
    kept = None if args.kept is None else Kept(args.kept)
    print(f"{len(tasks)} {args.half} tasks", flush=True)
    for library, reason in missing.items():
        print(f"{library} does not run: {reason}", flush=True)
    with measuring(tasks, args.processes, kept=kept) as measure_all:
        found = measure_all(
            standard.units(
                names, tasks, most=most, repetitions=args.repetitions, workers=args.workers
            )
        )
    settings = standard.by_setting(found)
    figures = {"missing peers": missing, **show_standard(settings, tasks)}
    if not args.methods:
        figures |= show_forecasts(tasks[:num], extra, repeats=1, quick=args.quick)
        development = [task for task, is_first in zip(real, first, strict=True) if is_first]
        development += made_up(judged=False)
        figures["orders"] = rung_orders(development, repeats=1 if args.quick else 3)
        _say(
            "Kendall's tau between epochs 1 and 9 in runs of ASHA, tuning tasks", figures["orders"]
        )
    figures["seconds"] = time.perf_counter() - began + (kept.earlier_seconds() if kept else 0)
    figures["processor seconds of studies"] = sum(float(m.ms.sum()) for m in found) / 1e3
    print(f"\n{figures['processor seconds of studies'] / 60:.1f} minutes of processor time")
    goals = standard.goals(settings, tasks)
    if not args.methods:
        goals += decision_goals(figures)
    goals.append(
        at_most("seconds of the standard run", figures["seconds"], MOST_SECONDS_OF_STANDARD)
    )
    finish("search", figures, goals)


def run_rates(args: argparse.Namespace) -> None:
    """Compare ``Auto`` with a sampler that learns, where there is one hyper-parameter."""
    tasks = rate_tasks(most=2 if args.quick else None)
    repeats = 1 if args.quick else min(args.repeats, RATE_REPEATS)
    names = [standard.AUTO, "Auto, KDE draws"]
    with measuring(tasks, args.processes) as measure_all:
        found = measure_all([
            Unit(name, RACE_WORKERS, at, repeats, in_epochs=True)
            for name in names
            for at in range(len(tasks))
        ])
    rows, limits = [], []
    for setting, regrets in (("epochs", "by_epochs"), ("seconds", "by_time")):
        means = {
            name: np.array([
                getattr(each, regrets).mean(0)
                for each in sorted(found, key=lambda each: each.unit.task)
                if each.unit.method == name
            ])
            for name in names
        }
        for name in names:
            row: dict[str, Any] = {"equal": setting, "method": name}
            row |= {
                f"{share:.0%}": float(x)
                for share, x in zip(SHARES, means[name].mean(0), strict=True)
            }
            difference = means[name][:, -1] - means[standard.AUTO][:, -1]
            low, high = interval(difference)
            row["minus Auto"] = float(difference.mean())
            row["minus Auto, 95%"] = f"{low:.3f} - {high:.3f}"
            if name != standard.AUTO:
                what = f"8 workers, {setting}: sure lead over Auto ({name}, at 100%)"
                limits.append(at_most(what, -high, 0.0))
            rows.append(row)
    _say(f"{len(tasks)} tasks with a learning rate, 8 workers, {repeats} repetitions", rows)
    finish("search", {"rates": rows}, limits)


def named(wanted: str | None, theirs: Sequence[Peer]) -> list[str]:
    """Return those methods that are asked for and installed; None asks for the standard ones.

    Raises:
        SystemExit: ``Auto`` is not among them.
    """
    ours = [*methods(), *boss_variants(), *auto_variants()]
    installed = [method.name for method in ours] + [peer.name for peer in theirs]
    asked = list(standard.EFFORTS) if wanted is None else wanted.split(";")
    if standard.AUTO not in asked:
        raise SystemExit("--methods must name Auto, as the others are compared with it")
    return [name for name in installed if name in asked]


def show_standard(
    settings: Mapping[str, standard.ByMethod], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Print the tables of the standard run."""
    figures: dict[str, Any] = {"settings": {}, "minus Auto": {}}
    for setting, here in settings.items():
        everywhere = standard.on_all_tasks(here)
        figures["settings"][setting] = standard.rows(everywhere, tasks)
        _say(f"{setting}: regrets on all {len(tasks)} tasks", figures["settings"][setting])
        figures["minus Auto"][setting] = standard.difference_rows(everywhere, tasks)
        _say(f"{setting}: regrets minus those of Auto", figures["minus Auto"][setting])
    slow = [
        row
        for setting, here in settings.items()
        for row in standard.slow_rows(standard.on_few_tasks(here), setting)
    ]
    figures["slow methods"] = slow
    if slow:
        _say("Slow methods on a few tasks, beside Auto on the same tasks", slow)
    gaps = {s: standard.gaps(standard.on_all_tasks(here), tasks) for s, here in settings.items()}
    figures["gaps"] = standard.gap_rows(gaps)
    _say("Auto behind the best of each family, at the end", figures["gaps"])
    return figures


def run_whole(args: argparse.Namespace) -> None:
    """Run all of our methods on all tasks, and peers on some."""
    began = time.perf_counter()
    tasks, extra = load(), made_up(judged=True)
    race, peer = Effort(RACE_REPEATS, 1), Effort(PEER_REPEATS, PEER_EVERY)
    theirs, missing = peers()
    if args.quick:
        args.repeats = 3
        args.slow_repeats = 1
        tasks = [tasks[0], tasks[9], tasks[27]]
        extra = extra[:1]
        race = peer = Effort(1, 1)
        theirs = [peer for peer in theirs if not peer.slow]
    num = len(tasks)
    kept = None if args.kept is None else Kept(args.kept)
    with measuring([*tasks, *extra], args.processes, kept=kept) as measure_all:
        raced, winner = hold_race(measure_all, race.repeats, tasks=tasks)
        ours = [*methods(), winner]
        found = run_all(
            measure_all,
            ours,
            repeats=args.repeats,
            slow_repeats=args.slow_repeats,
            num_tasks=num + len(extra),
        )
        real = [m for m in found if m.unit.task < num]
        figures = {"race": raced, **show(ours, real, tasks)}
        found_peers = run_peers(measure_all, [p.name for p in theirs], peer, num_tasks=num)
    made = [m for m in found if m.unit.task >= num]
    figures["made up"] = show_made_up(ours, made, extra)
    figures["peers"] = show_peers(ours, real, found_peers, peer, num_tasks=num)
    judged = [task for task, is_first in zip(tasks, halves(tasks), strict=True) if not is_first]
    repeats = 1 if args.quick else FORECAST_REPEATS
    figures |= show_forecasts(judged, extra, repeats=repeats, quick=args.quick)
    figures["missing peers"] = missing
    for library, reason in missing.items():
        print(f"{library} did not run: {reason}")
    figures |= {"winner of the race": winner.name, "budget epochs": pass_epochs()}
    figures["seconds"] = time.perf_counter() - began + (kept.earlier_seconds() if kept else 0)
    finish("search", figures, goals(figures))


def hold_race(
    measure_all: MeasureAll, repeats: int, *, tasks: Sequence[Task]
) -> tuple[list[dict[str, Any]], Method]:
    """Compare the variants of BOSS on the first half of the tasks, with 8 workers."""
    variants, setting = boss_variants(), SETTINGS[2]
    first = np.flatnonzero(halves(tasks)).tolist()
    found = measure_all([Unit(v.name, RACE_WORKERS, t, repeats) for v in variants for t in first])
    names = [v.name for v in variants]
    measured = collect(names, found, workers=(RACE_WORKERS,))
    rows = setting_rows(names, measured, [tasks[t] for t in first], setting)
    _say(f"Variants of BOSS on the first half of the tasks, {setting}", rows)
    return rows, next(v for v in variants if v.name == rows[0]["method"])


def run_all(
    measure_all: MeasureAll,
    ours: Sequence[Method],
    *,
    repeats: int,
    slow_repeats: int,
    num_tasks: int,
) -> list[Measurement]:
    """Measure all of our methods on all tasks.

    The slow ones come first, so that both processes end together.
    """

    def repeats_of(method: Method) -> int:
        wanted = slow_repeats if method.slow else repeats
        return wanted if method.most_repeats is None else min(wanted, method.most_repeats)

    return measure_all([
        Unit(m.name, w, t, repeats_of(m))
        for m in sorted(ours, key=lambda m: not m.slow)
        for w in reversed(WORKERS)
        for t in range(num_tasks)
    ])


def show(
    ours: Sequence[Method], found: Sequence[Measurement], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Print all tables of our methods."""
    names = [method.name for method in ours]
    measured = collect(names, found)
    figures: dict[str, Any] = {"settings": {}}
    for setting in SETTINGS:
        rows = setting_rows(names, measured, tasks, setting)
        figures["settings"][setting] = rows
        _say(setting, rows)
    first = halves(tasks)
    figures["everywhere"] = rank_rows(names, measured, np.ones(len(tasks), dtype=bool))
    _say("All settings, all tasks", figures["everywhere"])
    figures["judged"] = rank_rows(names, measured, ~first)
    figures["judged tasks"] = int((~first).sum())
    _say("All settings, the second half of the tasks", figures["judged"])
    return figures


def show_made_up(
    ours: Sequence[Method], found: Sequence[Measurement], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Print tables of our methods on made-up tasks, by setting."""
    names = [method.name for method in ours]
    measured = collect(names, found)
    figures = {}
    for setting in SETTINGS:
        figures[setting] = setting_rows(names, measured, tasks, setting)
        _say(f"Made-up curves, {setting}", figures[setting])
    return figures


def show_forecasts(
    judged: Sequence[Task], extra: Sequence[Task], *, repeats: int, quick: bool
) -> dict[str, Any]:
    """Print the calibration of the curve model, and times of decisions."""
    figures = {
        "calibration": calibration(judged, repeats=repeats),
        "calibration, made up": calibration(extra, repeats=repeats),
        "decision times": decision_times(NUMS[:2] if quick else NUMS),
    }
    for name, rows in figures.items():
        _say(f"Freeze-thaw: {name}", rows)
    return figures


def run_peers(
    measure_all: MeasureAll, theirs: Sequence[str], effort: Effort, *, num_tasks: int
) -> list[Measurement]:
    return measure_all([
        Unit(name, w, t, effort.repeats)
        for name in theirs
        for w in reversed(WORKERS)
        for t in range(0, num_tasks, effort.every)
    ])


def show_peers(
    ours: Sequence[Method],
    found: Sequence[Measurement],
    found_peers: Sequence[Measurement],
    effort: Effort,
    *,
    num_tasks: int,
) -> list[dict[str, Any]]:
    """Compare peers and ours on the same tasks with as many repetitions."""
    tasks = range(0, num_tasks, effort.every)
    some = [_first(m, effort.repeats) for m in found if m.unit.task in tasks]
    names = list(dict.fromkeys([*(m.name for m in ours), *(m.unit.method for m in found_peers)]))
    measured = collect(names, [*some, *found_peers])
    rows = rank_rows(names, measured, np.ones(len(tasks), dtype=bool))
    by_name = dict(zip(names, measured, strict=True))
    for row in rows:
        row["ms a study, 8 workers"] = float(by_name[row["method"]].ms[8].mean())
    _say(f"With peers: all settings, {len(tasks)} of the tasks", rows)
    return rows


def _first(measurement: Measurement, num: int) -> Measurement:
    unit, *arrays = measurement
    return Measurement(unit, *(array[:num] for array in arrays))


def goals(figures: dict[str, Any]) -> list[Goal]:
    judged = figures["judged"]
    boss = [row for row in judged if row["method"].startswith("BOSS")]
    others = [row for row in judged if row not in boss]
    capped = {method.name for method in methods() if method.most_repeats is not None}
    fewest = min(
        (row for row in judged if row["method"] not in capped), key=lambda row: row["repetitions"]
    )
    out = [at_least(f"repetitions ({fewest['method']})", fewest["repetitions"], 50)]
    for row in boss:
        name = f"{row['method']}: mean rank behind the best other ({others[0]['method']})"
        out.append(at_most(name, row["mean rank"] - others[0]["mean rank"], 0))
    out += decision_goals(figures)
    print(f"Best mean rank on the judged tasks: {judged[0]['method']}")
    return [*out, at_most("seconds of the whole bench", figures["seconds"], MOST_SECONDS)]


def decision_goals(figures: dict[str, Any]) -> list[Goal]:
    """Return the goals for the time of a decision of freeze-thaw."""
    return [
        at_most(
            f"seconds of a freeze-thaw decision, {row['trials']:,} trials",
            row["later decisions [s], longest"],
            MOST_SECONDS_OF_A_DECISION[row["trials"]],
        )
        for row in figures["decision times"]
        if row["trials"] in MOST_SECONDS_OF_A_DECISION
    ]


def _say(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n## {title}\n")
    table(rows)


if __name__ == "__main__":
    main()
