"""Gyro dropout: time that block-wise gyro saves in a training step, and accuracy of either form.

    python -m bench.bench_gyro [--quick] [--device cuda] [--fit] [--only PART]

Speed: perceptrons of three hidden layers and the feed-forward layer of a Transformer, with forward,
backward and SGD. Gyros and ``nn.Dropout`` alternate in one process for each width.

Accuracy: thrifty studies (packed), with rates chosen on validation data and errors on test data
over five seeds. *numbers* is the same for other numbers of subnetworks than the paper's, *cycles*
for subnetworks that each have their turn several times. The data are read from ``$THRIFTY_DATA``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

from bench.common.harness import Goal, at_least, at_most, data_folder, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.gyro.setting import PASSES
from bench.gyro.workloads import SETTINGS
from bench.rex import workloads as rex


WIDTHS = (1024, 2048, 4096)
CONCURRENTS = (1, 4, 8, 16)
GRAPHS = ("amazon_cs", "cora")
NUMBERS_OF = ("MLP, MNIST", "MLP, digits", "SAGE, Cora")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--only", choices=["speed", "accuracy", "numbers", "cycles"])
    options.add_argument(
        "--fit",
        action="store_true",
        help="measure how well perf.SlicingCosts foresee, and nothing else",
    )
    options.add_argument(
        "--workers", type=int, default=2, help="settings at a time, one thread each"
    )
    args = options.parse_args()
    if args.fit:
        found = with_threads("bench.gyro.fit", {"rounds": 1 if args.quick else 5})
        table([found])
        return finish("gyro_fit", found, [])
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    if args.only in {None, "speed"}:
        figures["speed"], more = speed(args.device, quick=args.quick)
        goals += more
    if args.only in {None, "accuracy"}:
        figures["accuracy"], more = accuracy(workers=args.workers, quick=args.quick)
        goals += more
    for what in ("numbers", "cycles"):
        if args.only in {None, what}:
            figures[what] = others(what, workers=args.workers, quick=args.quick)
    return finish("gyro", figures, goals)


# -- speed -----------------------------------------------------------------------------------


def speed(device: str, *, quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Return a table for each width and allocator."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    # those with a goal first
    cases = [("MLP", WIDTHS[-1], 256), ("Transformer MLP", WIDTHS[-1], 16)]
    cases += [("MLP", width, 256) for width in WIDTHS[:-1]]
    if quick:
        cases = [("MLP", 256, 64), ("Transformer MLP", 256, 16)]
    settings = [
        {
            "network": network,
            "width": width,
            "batch": batch,
            "group_size": max(16, width // 64),
            "concurrents": CONCURRENTS,
            "rounds": 2 if quick else 7,
            "device": device,
            "tuned": tuned,
        }
        for network, width, batch in cases
        for tuned in ([False] if quick or device == "cuda" else [False, True])
    ]
    if device == "cuda":
        # Kernels are compiled for all cases side by side, and read from Triton's cache below.
        with ThreadPoolExecutor(len(settings)) as pool:
            list(pool.map(partial(with_threads, "bench.gyro.speed"), map(compiled, settings)))
    for case in settings:
        network, width, tuned = case["network"], case["width"], case["tuned"]
        found = with_threads("bench.gyro.speed", case)
        rows.append({**case, **found})
        show(network, width, tuned=tuned, found=found)
        times = found["ms"]
        if width == WIDTHS[-1]:
            allocator = ", tuned allocator" if tuned else ""
            for tau in CONCURRENTS:
                block = f"block-wise, tau {tau}"
                goals += [
                    at_least(
                        f"{network} {width}, tau {tau}{allocator}{how}: nn.Dropout / block-wise",
                        times[f"nn.Dropout{how}"] / times[f"{block}{how}"],
                        1.3,
                    )
                    for how in ("", ", captured")
                    if f"{block}{how}" in times
                ]
    return rows, goals


def compiled(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to compile a case's kernels and measure nothing."""
    return {**case, "only_compile": True}


def show(network: str, width: int, *, tuned: bool, found: Mapping[str, Any]) -> None:
    """Print one case."""
    allocator = "allocator tuned" if tuned else "default allocator"
    print(f"\n{network}, {width} wide, {allocator}\n")
    base = found["ms"]["nn.Dropout"]
    table([
        {
            "training step": name,
            "ms": ms,
            "ms to launch": found["launch ms"][name],
            "times as fast as nn.Dropout": base / ms,
        }
        for name, ms in found["ms"].items()
    ])
    print(f"sliced products: {found['way']}")
    floors = found["floors"]
    print(
        f"floor: {floors['whole']['flops ms']:.1f} ms of operations and "
        f"{floors['whole']['bytes ms']:.1f} ms of memory whole; "
        f"{floors['kept']['flops ms']:.1f} and {floors['kept']['bytes ms']:.1f} with what is kept "
        f"({found['GFLOP/s']:.0f} GFLOP/s, {found['GB/s']:.1f} GB/s measured)"
    )


def with_threads(module: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run in a fresh process, on all cores."""
    return in_fresh_process(module, json.dumps({**options, "threads": os.cpu_count() or 1}))


# -- accuracy --------------------------------------------------------------------------------


def accuracy(*, workers: int, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    """Return a table for each setting."""
    missing = [
        *rex.missing_data(),
        *(
            path
            for name in GRAPHS
            if not (path := data_folder() / "graphs" / f"{name}.npz").is_file()
        ),
    ]
    if missing:
        raise SystemExit(f"no data at {', '.join(map(str, missing))}; set THRIFTY_DATA")

    def run(name: str) -> dict[str, Any]:
        more = ["--quick"] if quick else []
        found = in_fresh_process("bench.gyro.setting", "--setting", name, *more)
        print(f"{name}: {found['seconds']:,.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(workers) as pool:
        results = dict(zip(SETTINGS, pool.map(run, SETTINGS), strict=True))
    goals: list[Goal] = []
    better = 0
    for name, found in results.items():
        print(f"\n{name}: test error, %\n")
        methods = found["methods"]
        table(rows_of(methods))
        print(f"{PASSES} passes take {found['times_as_long']:.1f} times as long as one")
        gained = mean(methods["dropout"]["test"]) - mean(methods["gyro"]["test"])
        better += gained > 0
        goals.append(at_least(f"{name}: dropout's error - gyro's", gained, 0))
        lost = mean(methods["block"]["test"]) - mean(methods["gyro"]["test"])
        goals.append(at_most(f"{name}: block-wise gyro's error - gyro's", lost, 0.2))
    goals.append(
        at_least("settings where gyro is better than dropout", better, len(SETTINGS) // 2 + 1)
    )
    return results, goals


def others(what: str, *, workers: int, quick: bool) -> dict[str, Any]:
    """Run the same study with other numbers of subnetworks than the paper's, or other cycles.

    It uses the settings where it takes a minute.
    """

    def run(name: str) -> dict[str, Any]:
        more = ["--quick"] if quick else []
        return in_fresh_process("bench.gyro.setting", "--setting", name, "--others", what, *more)

    with ThreadPoolExecutor(workers) as pool:
        results = dict(zip(NUMBERS_OF, pool.map(run, NUMBERS_OF), strict=True))
    for name, found in results.items():
        print(f"\n{name}: test error by subnetworks (all/at a time/cycles), %\n")
        table(rows_of(found["methods"]))
        print(f"validation data choose {found['tuned']}")
    return results


def rows_of(methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with means, intervals from Student's distribution, and paired tests.

    Equal seeds have equal initial weights and equal batches.
    """
    dropout = methods["dropout"]["test"]
    rows = []
    for name, found in methods.items():
        errors = found["test"]
        half = stats.t.ppf(0.975, len(errors) - 1) * stats.sem(errors)
        same = name == "dropout" or np.allclose(errors, dropout)
        rows.append({
            "method": name,
            "tuned p": found["rate"],
            "error, %": mean(errors),
            "95 % interval": f"{mean(errors) - half:.2f} to {mean(errors) + half:.2f}",
            "less than dropout, points": mean(dropout) - mean(errors),
            "p-value": None if same else float(stats.ttest_rel(errors, dropout).pvalue),
        })
    return rows


if __name__ == "__main__":
    main()
