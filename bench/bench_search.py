"""Search algorithms on tables of real learning curves: regret at equal epochs and at equal time.

    python -m bench.bench_search [--quick] [--repeats 50]

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

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from bench.common.harness import Goal, at_least, at_most, finish, parser, table
from bench.search.curve_forecasts import NUMS, calibration, decision_times
from bench.search.curves import Task, load
from bench.search.made_up_curves import made_up
from bench.search.methods import Method, boss_variants, methods, pass_epochs, quicken_optuna
from bench.search.peers import peers
from bench.search.report import SETTINGS, SHARES, WORKERS, Measured, halves, rank_rows, setting_rows
from bench.search.simulator import Limit, OurSearch, Outcome, Searcher, simulate, study_seed
from thrifty.search import Auto


SLOW_REPEATS = 50
PEER_REPEATS, PEER_EVERY = 2, 5
RACE_REPEATS, RACE_WORKERS = 5, 8
MOST_SECONDS = 1200
FORECAST_REPEATS = 4
MOST_SECONDS_OF_A_DECISION = {1_000: 0.2, 100_000: 1.0}


class Effort(NamedTuple):
    """Number of repetitions, and the stride over tasks."""

    repeats: int
    every: int


class Unit(NamedTuple):
    """All repetitions of one method (one of ours, or a peer) on one task."""

    method: str
    num_workers: int
    task: int
    repeats: int


class Measurement(NamedTuple):
    """Results by repetition.

    They are regrets at the shares of the time and of the epochs, utilisation, and milliseconds of
    processor time.
    """

    unit: Unit
    by_time: np.ndarray
    by_epochs: np.ndarray
    utilisation: np.ndarray
    ms: np.ndarray


def limit(num_workers: int) -> Limit:
    """Return the time in which that many workers (8 at most) would train one pass.

    The mean epoch takes 1 s.
    """
    budget = pass_epochs()
    return Limit(seconds=budget / min(num_workers, 8), epochs=budget if num_workers == 1 else 0)


def passes(num_workers: int) -> int:
    """Return how many passes of Hyperband that many busy workers train within their limit."""
    return max(num_workers // 8, 1)


def _makers(num_workers: int) -> dict[str, Callable[[Task, int], Searcher]]:
    def ours(method: Method, task: Task, seed: int) -> Searcher:
        algorithm = method.make(passes(num_workers))
        if isinstance(algorithm, Auto):
            algorithm = algorithm.chosen(task.space, workers=num_workers).algorithm
        return OurSearch(algorithm, task, seed=seed)

    out: dict[str, Callable[[Task, int], Searcher]] = {
        method.name: partial(ours, method) for method in [*methods(), *boss_variants()]
    }
    return out | {peer.name: peer.make for peer in peers()[0]}


_tasks: list[Task] = []
"""The tasks, which the worker processes inherit."""


def measure(unit: Unit) -> Measurement:
    make, task, ends = (
        _makers(unit.num_workers)[unit.method],
        _tasks[unit.task],
        limit(unit.num_workers),
    )
    outcomes: list[Outcome] = []
    ms: list[float] = []
    for repeat in range(unit.repeats):
        began = time.process_time()
        searcher = make(task, study_seed(task, repeat))
        outcomes.append(simulate(searcher, task, num_workers=unit.num_workers, limit=ends))
        ms.append((time.process_time() - began) * 1e3)
    return Measurement(
        unit,
        np.array([[o.regret_at(seconds=s * ends.seconds) for s in SHARES] for o in outcomes]),
        np.array([[o.regret_at(epochs=s * ends.epochs) for s in SHARES] for o in outcomes]),
        np.array([o.busy_seconds for o in outcomes]) / (ends.seconds * unit.num_workers),
        np.array(ms),
    )


MeasureAll = Callable[[Sequence[Unit]], list[Measurement]]


@contextmanager
def measuring(num_processes: int) -> Iterator[MeasureAll]:
    """Yield a function that measures units in a few processes, in the given order."""
    for task in _tasks:
        task.prepare()
    gc.freeze()
    with get_context("fork").Pool(num_processes) as pool:
        yield lambda units: list(pool.imap_unordered(measure, units))


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
    options.add_argument(
        "--slow-repeats", type=int, default=SLOW_REPEATS, help="runs of methods with a slow sampler"
    )
    options.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = options.parse_args()
    warnings.filterwarnings("ignore")  # peers announce experimental features thousands of times
    began = time.perf_counter()
    quicken_optuna()
    _tasks.extend(load())
    extra = made_up(judged=True)
    race, peer = Effort(RACE_REPEATS, 1), Effort(PEER_REPEATS, PEER_EVERY)
    if args.quick:
        args.repeats = 3
        args.slow_repeats = 1
        _tasks[:] = [_tasks[0], _tasks[9], _tasks[27]]
        extra = extra[:1]
        race = peer = Effort(1, 1)
    theirs, missing = peers()
    num = len(_tasks)
    _tasks.extend(extra)
    with measuring(args.processes) as measure_all:
        raced, winner = hold_race(measure_all, race.repeats, num_tasks=num)
        ours = [*methods(), winner]
        found = run_all(measure_all, ours, repeats=args.repeats, slow_repeats=args.slow_repeats)
        real = [m for m in found if m.unit.task < num]
        figures = {"race": raced, **show(ours, real, _tasks[:num])}
        found_peers = run_peers(measure_all, [p.name for p in theirs], peer, num_tasks=num)
    figures["made up"] = show_made_up(ours, [m for m in found if m.unit.task >= num], extra)
    figures["peers"] = show_peers(ours, real, found_peers, peer, num_tasks=num)
    figures |= show_forecasts(_tasks[:num], extra, quick=args.quick)
    figures["missing peers"] = missing
    for library, reason in missing.items():
        print(f"{library} did not run: {reason}")
    figures |= {"winner of the race": winner.name, "budget epochs": pass_epochs()}
    figures["seconds"] = time.perf_counter() - began
    finish("search", figures, goals(figures))


def hold_race(
    measure_all: MeasureAll, repeats: int, *, num_tasks: int
) -> tuple[list[dict[str, Any]], Method]:
    """Compare the variants of BOSS on the first half of the tasks, with 8 workers."""
    variants, setting = boss_variants(), SETTINGS[2]
    first = np.flatnonzero(halves(_tasks[:num_tasks])).tolist()
    found = measure_all([Unit(v.name, RACE_WORKERS, t, repeats) for v in variants for t in first])
    names = [v.name for v in variants]
    measured = collect(names, found, workers=(RACE_WORKERS,))
    rows = setting_rows(names, measured, [_tasks[t] for t in first], setting)
    _say(f"Variants of BOSS on the first half of the tasks, {setting}", rows)
    return rows, next(v for v in variants if v.name == rows[0]["method"])


def run_all(
    measure_all: MeasureAll, ours: Sequence[Method], *, repeats: int, slow_repeats: int
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
        for t in range(len(_tasks))
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


def show_forecasts(tasks: Sequence[Task], extra: Sequence[Task], *, quick: bool) -> dict[str, Any]:
    """Print the calibration of the curve model on the judged tasks, and times of decisions."""
    judged = [task for task, is_first in zip(tasks, halves(tasks), strict=True) if not is_first]
    repeats = 1 if quick else FORECAST_REPEATS
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
    for row in figures["decision times"]:
        most = MOST_SECONDS_OF_A_DECISION.get(row["trials"])
        if most is not None:
            name = f"seconds of a freeze-thaw decision, {row['trials']:,} trials"
            out.append(at_most(name, row["later decisions [s], longest"], most))
    print(f"Best mean rank on the judged tasks: {judged[0]['method']}")
    return [*out, at_most("seconds of the whole bench", figures["seconds"], MOST_SECONDS)]


def _say(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n## {title}\n")
    table(rows)


if __name__ == "__main__":
    main()
