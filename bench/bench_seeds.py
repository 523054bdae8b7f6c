"""Several seeds for each configuration: the choice that they allow, and what packing them saves.

    python -m bench.bench_seeds [--quick] [--repeats 10] [--only "digits, SGD"]

Four small networks with 16 configurations each. The truth is the mean validation loss over 30 seeds
that no method selects with. A study with ``seeds=5`` trains the whole grid. Optuna gets the same
grid in random order, the mean over five seeds as its objective, plain PyTorch loops that evaluate
once at their end, and the same seconds, counted from the start of our workers; a trial that it has
started is finished. ``one seed`` is what the first of our five seeds alone would have chosen. Each
repeat has seeds of its own.

Shares of repeats have Wilson's 95 % intervals. Differences and regrets have 95 % bootstrap
intervals, drawn within each task. ``certainty`` is the mean of ``best_trial.certainty``: it is
honest if it is the share of repeats that chose the true best. The truth itself is uncertain; its
own certainty stands beside it.

The second table compares the training seconds of one study trained in turn (``pack="solo"``) and
packed (``pack="auto"``), alternating, one thread each. Measurements and checks of packing count.
``plain loops`` is what Optuna's objective needs for as many trainings, from its trials above.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from bench.common.harness import Goal, at_least, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.seeds.workloads import SETTINGS


SPEED_UP = 3.0
"""What packed replicas of small networks must save at least."""
NUM_DRAWS = 10_000


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=10)
    options.add_argument("--only", choices=SETTINGS, help="one task alone")
    args = options.parse_args()
    repeats = 2 if args.quick else args.repeats
    began = time.perf_counter()
    results: dict[str, dict[str, Any]] = {}
    for name in [args.only] if args.only else SETTINGS:
        quick = ["--quick"] if args.quick else []
        results[name] = in_fresh_process(
            "bench.seeds.selection", "--task", name, "--repeats", str(repeats), *quick
        )
        print(f"{name}: {time.perf_counter() - began:.0f} s so far", flush=True)
    total = pooled(results)
    print(f"\nchosen the true best of 16 / mean regret, {repeats} repeats of each task\n")
    table([*[choice_row(name, each) for name, each in results.items()], pooled_row(total)])
    print(f"\nours less Optuna: {difference_text(total)}")
    print("\none study of 16 configurations with 5 seeds, training seconds\n")
    table([speed_row(name, result) for name, result in results.items()])
    figures = {
        "seconds": time.perf_counter() - began,
        "repeats": repeats,
        "tasks": results,
        "all tasks": total,
    }
    finish("seeds", figures, goals(results, total))


def wilson(hits: Sequence[bool]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share of hits.

    >>> [round(end, 2) for end in wilson([True] * 9 + [False])]
    [0.6, 0.98]
    """
    num, share, z = len(hits), mean(hits), 1.96
    centre = (share + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2)) / (1 + z**2 / num)
    return centre - half, centre + half


def bootstrapped(parts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the mean over parts, drawn within each part."""
    rng = np.random.default_rng(0)
    means = [
        np.asarray(part, dtype=float)[rng.integers(len(part), size=(NUM_DRAWS, len(part)))].mean(1)
        for part in parts
    ]
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return float(low), float(high)


def pooled(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all tasks together, each with its interval."""

    def of(method: str, what: str) -> list[list[float]]:
        return [[float(v) for v in each["methods"][method][what]] for each in results.values()]

    methods = {}
    for method in ("ours", "optuna", "one seed"):
        hits = [bool(hit) for part in of(method, "hits") for hit in part]
        regrets = of(method, "regrets")
        methods[method] = {
            "hits": mean(hits),
            "hits_interval": wilson(hits),
            "regret": mean(mean(part) for part in regrets),
            "regret_interval": bootstrapped(regrets),
        }
    difference = [
        [a - b for a, b in zip(one, other, strict=True)]
        for one, other in zip(of("ours", "hits"), of("optuna", "hits"), strict=True)
    ]
    return {
        "methods": methods,
        "difference": mean(mean(part) for part in difference),
        "difference_interval": bootstrapped(difference),
        "certainty": mean(c for each in results.values() for c in each["certainties"]),
    }


def choice_row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": name,
        **{
            method: f"{_share(found['hits'])} / {mean(found['regrets']):.1%}"
            for method, found in result["methods"].items()
        },
        "certainty": f"{mean(result['certainties']):.0%}",
        "of the truth": f"{result['truth_certainty']:.0%}",
        "seconds": result["seconds"],
        "optuna's seconds": result["optuna_seconds"],
        "optuna tried": result["tried"],
    }


def _share(hits: Sequence[bool]) -> str:
    low, high = wilson(hits)
    return f"{mean(hits):.0%} ({low:.0%} to {high:.0%})"


def pooled_row(total: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"task": "all"}
    for method, found in total["methods"].items():
        low, high = found["hits_interval"]
        shown[method] = f"{found['hits']:.0%} ({low:.0%} to {high:.0%}) / {found['regret']:.1%}"
    return {**shown, "certainty": f"{total['certainty']:.0%}"}


def difference_text(total: Mapping[str, Any]) -> str:
    low, high = total["difference_interval"]
    return f"{total['difference']:+.0%} of the repeats ({low:+.0%} to {high:+.0%})"


def speed_row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    factors = result["speed_ups"]
    return {
        "task": name,
        "in turn": median(row["solo"] for row in result["speed"]),
        "plain loops": result["plain_seconds"],
        "packed": median(row["auto"] for row in result["speed"]),
        "factor (median)": median(factors),
        "range": f"{min(factors):.1f} to {max(factors):.1f}",
        "epochs in packs": f"{result['packed']:.0%}",
    }


def goals(results: Mapping[str, Mapping[str, Any]], total: Mapping[str, Any]) -> list[Goal]:
    methods = total["methods"]
    return [
        at_least(
            "true best chosen, as often as by Optuna",
            methods["ours"]["hits"],
            methods["optuna"]["hits"],
        ),
        *(
            at_least(f"packed replicas, {name}", median(result["speed_ups"]), SPEED_UP)
            for name, result in results.items()
        ),
    ]


if __name__ == "__main__":
    main()
