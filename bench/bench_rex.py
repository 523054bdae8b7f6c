"""Learning rate schedules for a budget, compared on real training.

    python -m bench.bench_rex [--quick] [--workers 2] [--only "MLP, digits, SGD"]

The experiment is that of Chen, Wolfe and Kyrillidis, "REX: Revisiting Budgeted Training with an
Improved Schedule", MLSys 2022, section 4, small enough for a CPU: eight settings (an MLP and a CNN
on 14 x 14 MNIST, an MLP on digits, a character Transformer; SGD with momentum 0.9 and AdamW),
budgets of 1 to 100 percent of the most epochs, learning rates in multiples of 3.

Each schedule gets the learning rate that did best on the validation data at seed 0, chosen anew for
each setting and budget. The reported figure is the mean on test data at seeds 1, 2 and 3. A trial
that fails is the worst. The studies of a setting have one database, so what schedules and budgets
share (all of a constant rate, the stable phase of WSD, step until its first drop) is trained once,
and trials are packed where that pays. Every schedule but plateau runs in thrifty studies. Plateau
must see the loss: it is a plain loop with the same weights and batches, not counted as saved.
Settings run two at a time, each in a process with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Any

import thrifty as th
from bench.common.harness import Goal, at_most, equal, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.rex.schedules import NAMES, PAPER, worst_if_failed
from bench.rex.setting import SETTINGS
from bench.rex.workloads import missing_data


Results = Mapping[str, dict[str, Any]]
Cell = Mapping[str, float]
"""One setting at one budget: lower is better, infinite is a trial that failed."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=2, help="settings at a time")
    options.add_argument("--only", choices=SETTINGS, help="one setting alone")
    args = options.parse_args()
    if missing := missing_data():
        options.error(f"not found (nothing is downloaded): {', '.join(map(str, missing))}")
    names = [args.only] if args.only else list(SETTINGS)
    began = time.perf_counter()

    def run(name: str) -> dict[str, Any]:
        quick = ["--quick"] if args.quick else []
        result = in_fresh_process("bench.rex.setting", "--setting", name, *quick)
        print(f"{name}: {result['studies_seconds'] + result['plateau_seconds']:.0f} s", flush=True)
        return result

    with ThreadPoolExecutor(args.workers) as pool:
        results = dict(zip(names, pool.map(run, names), strict=True))
    seconds = time.perf_counter() - began
    report(results, seconds=seconds, quick=args.quick)


def report(results: Results, *, seconds: float, quick: bool) -> None:
    for name, result in results.items():
        print(f"\n{name} ({result['metric']})\n")
        table([
            {"schedule": s, **{f"{p}%": cell[s] for p, cell in result["means"].items()}}
            for s in NAMES
        ])
    print("\nbest / among the best three, in percent of the settings, and mean rank\n")
    standings = rows_of_standings(results)
    table(standings)
    print("\nwhat sharing and packing saved\n")
    table([savings_row(name, result) for name, result in results.items()])
    edge = mean(result["at_edge"] for result in results.values())
    print(f"\n{edge:.0%} of the chosen rates are at an end of their grid; {seconds:.0f} s in all")
    figures = {"seconds": seconds, "standings": standings, "settings": results}
    finish("rex", figures, goals(results, quick=quick))


def cells_of(results: Results, *, percent: str | None = None) -> list[Cell]:
    """Return a cell for each setting and budget (or at one budget); failures are the worst."""
    return [
        {name: worst_if_failed(value) for name, value in cell.items()}
        for result in results.values()
        for p, cell in result["means"].items()
        if percent in (None, p)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One schedule over some cells, in percent of them; ``rank`` is its mean, 1 is the best."""

    top1: float
    top3: float
    rank: float


def standing(cells: Iterable[Cell], name: str) -> Standing:
    """Return the standing of a schedule.

    Equal schedules share a place: all of them are the best, or among the best three. For the mean
    rank they get the middle of their ranks.

        >>> standing([{"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0}], "b")
        Standing(top1=100.0, top3=100.0, rank=1.5)
        >>> standing([{"a": 1.0, "b": math.inf}, {"a": 2.0, "b": 1.0}], "b").rank
        1.5
    """
    places, ranks = [], []
    for cell in cells:
        better = sum(value < cell[name] for value in cell.values())
        ties = sum(value == cell[name] for value in cell.values())
        places.append(better + 1)
        ranks.append(better + (ties + 1) / 2)
    return Standing(
        top1=100.0 * mean(place <= 1 for place in places),
        top3=100.0 * mean(place <= 3 for place in places),
        rank=mean(ranks),
    )


def rows_of_standings(results: Results) -> list[dict[str, Any]]:
    percents = sorted({p for result in results.values() for p in result["means"]}, key=int)
    rows = []
    for name in NAMES:
        row: dict[str, Any] = {"schedule": name}
        for percent in percents:
            here = standing(cells_of(results, percent=percent), name)
            row[f"{percent}%"] = f"{here.top1:.0f} / {here.top3:.0f}, {here.rank:.2f}"
        whole = standing(cells_of(results), name)
        row |= {"all": f"{whole.top1:.0f} / {whole.top3:.0f}", "mean rank": whole.rank}
        rows.append({**row, "paper, all": PAPER.get(name)})
    return rows


def savings_row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "setting": name,
        "studies": result["studies"],
        "trial-epochs": result["trial_epochs"],
        "trained": result["epochs_trained"],
        "sharing": result["shared_factor"],
        "packing": result["packed_factor"],
        "training s": result["training_seconds"],
        "studies s": result["studies_seconds"],
        "plateau s": result["plateau_seconds"],
        "failed trials": result["failed_trials"],
    }


def goals(results: Results, *, quick: bool) -> list[Goal]:
    expected = sum(
        len((SETTINGS[name].quick() if quick else SETTINGS[name]).budgets()) for name in results
    )
    cells = cells_of(results)
    complete = sum(set(cell) == set(NAMES) for cell in cells)
    ranks = {name: standing(cells, name).rank for name in NAMES}
    return [
        equal("settings and budgets with every schedule", complete, expected),
        at_most("REX, difference from the paper's values", oracle_difference(), 1e-12),
        Goal(
            name="REX has the best mean rank",
            value=round(ranks["REX"], 3),
            goal=(
                f"<= {min(ranks.values()):.3f}, the best of all (for information: the "
                f"paper's claim)"
            ),
            holds=ranks["REX"] <= min(ranks.values()),
        ),
    ]


def oracle_difference() -> float:
    """Return how far REX is from its formula, computed by hand.

    It checks five steps, and three moments of a long run.
    """
    five = th.REX(1.0).values(0, 5, epochs=5)
    moments = th.REX(1.0).values(0, 100, epochs=100)[[50, 75, 90]]
    pairs: Sequence[tuple[float, float]] = [
        *zip(five, [1, 8 / 9, 3 / 4, 4 / 7, 1 / 3], strict=True),
        *zip(moments, [2 / 3, 2 / 5, 2 / 11], strict=True),
    ]
    return max(abs(float(ours) - theirs) for ours, theirs in pairs)


if __name__ == "__main__":
    main()
