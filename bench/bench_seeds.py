"""Several seeds for each configuration: the choice that they allow, and what packing them saves.

    python -m bench.bench_seeds [--quick] [--repeats 10] [--only "digits, SGD"]

Four small networks with 16 configurations each. The truth is the mean validation loss over 30 seeds
that no method selects with. A study with ``seeds=5`` trains the whole grid. Optuna gets the same
grid in random order, the mean over five seeds as its objective, plain PyTorch loops, and the same
seconds; a trial that it has started is finished. ``one seed`` is what the first of our five seeds
alone would have chosen. Each repeat has seeds of its own.

The second table compares the training seconds of one study trained in turn (``pack="solo"``) and
packed (``pack="auto"``), alternating, one thread each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean
from typing import Any

from bench.common.harness import Goal, at_least, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.seeds.workloads import SETTINGS


SPEED_UP = 3.0
"""What packed replicas of small networks must save at least."""


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
    print(f"\nchosen the true best of 16 / mean regret, {repeats} repeats\n")
    table([choice_row(name, result) for name, result in results.items()])
    print("\none study of 16 configurations with 5 seeds, training seconds\n")
    table([speed_row(name, result) for name, result in results.items()])
    figures = {"seconds": time.perf_counter() - began, "repeats": repeats, "tasks": results}
    finish("seeds", figures, goals(results))


def choice_row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": name,
        **{
            method: f"{found['hits']:.0%} / {found['regret']:.1%}"
            for method, found in result["methods"].items()
        },
        "certainty": f"{result['certainty']:.0%}",
        "seconds": result["seconds"],
        "optuna's seconds": result["optuna_seconds"],
        "optuna tried": result["tried"],
    }


def speed_row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    last = result["speed"][-1]
    return {
        "task": name,
        "in turn": last["solo"],
        "packed": last["auto"],
        "factor (median)": result["speed_up"],
        "epochs in packs": f"{result['packed']:.0%}",
    }


def goals(results: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    def hits(method: str) -> float:
        return mean(result["methods"][method]["hits"] for result in results.values())

    return [
        at_least("true best chosen, as often as by Optuna", hits("ours"), hits("optuna")),
        *(
            at_least(f"packed replicas, {name}", result["speed_up"], SPEED_UP)
            for name, result in results.items()
        ),
    ]


if __name__ == "__main__":
    main()
