"""81 schedules on digits: thrifty, a bare loop over the same stage tree, Optuna and Ray Tune.

    python -m bench.bench_sharing [--quick] [--repeats 3] [--with-ray]
    python -m bench.bench_sharing --device cuda

Thrifty runs with packing and without. Each method runs in a fresh process; ours and the bare loops
are interleaved. Seconds are what a user waits for once everything is imported. Ray Tune runs once,
because it takes minutes.

With ``--device``, a small convolutional network trains on that device through ``th.Study``, with
and without packing, and each trial alone; without peers. Their results are compared bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.harness import Goal, at_least, at_most, equal, finish, median_ratio, parser, table
from bench.common.long_study import long_row
from bench.common.processes import in_fresh_process
from bench.sharing import gpu


METHODS = "bench.sharing.methods"
LONG = "bench.common.long_study"
Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--with-ray", action="store_true", help="Ray Tune in a quick run, too")
    options.add_argument(
        "--no-ray", action="store_true", help="without Ray Tune, which takes minutes"
    )
    options.add_argument("--device", help="cuda or cpu: sharing on this device, without peers")
    args = options.parse_args()
    if args.device is not None:
        gpu.run(args.device, quick=args.quick)
        return
    size = ["--max-epochs", "9", "--configs", "9"] if args.quick else []
    runs: Runs = {}

    def run(name: str, method: str, *more: str) -> None:
        result = in_fresh_process(METHODS, method, *size, *more)
        print(f"{name}: {result['seconds']:.2f} s, {result['epochs']} epochs", flush=True)
        runs.setdefault(name, []).append(result)

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for algorithm in ("halving", "Hyperband"):
                # The bare loop trains exactly the epochs that thrifty requested.
                requests = ["--requests", str(Path(folder) / f"{algorithm}.json")]
                run(f"thrifty {algorithm}", "thrifty", "--algorithm", algorithm.lower(), *requests)
                run(f"bare {algorithm}", "bare_requests", *requests)
                run(
                    f"thrifty packed {algorithm}",
                    "thrifty",
                    "--algorithm",
                    algorithm.lower(),
                    "--pack",
                    "auto",
                )
        run("Optuna", "optuna")
        if args.with_ray or not (args.quick or args.no_ray):
            run("Ray Tune", "ray")
    flags = ["--quick"] if args.quick else []
    long = [in_fresh_process(LONG, "sharing", *flags) for _ in range(args.repeats)]
    report(runs, long)


def report(runs: Runs, long: list[dict[str, Any]]) -> None:
    rows = []
    for name, results in runs.items():
        rows.append({
            "method": name,
            "seconds": median(r["seconds"] for r in results),
            "epochs trained": results[0]["epochs"],
            "best accuracy": results[0]["best"],
            "peak MB": median(r["peak_mb"] for r in results),
            "shared": results[0].get("shared_factor"),
            "packed": results[0].get("packed_factor"),
            "checks": median(r.get("checks_share", 0.0) for r in results),
            "runs": len(results),
        })
    table(rows)
    by_name = {row["method"]: row for row in rows}
    print()
    table([long_row(result) for result in long])
    share = median(result["checks_share"] for result in long)
    price = at_most("a study of a minute: checks_share", share, 0.02)
    figures = {"rows": rows, "runs": runs, "long": long}
    finish("sharing", figures, [*goals(by_name, runs), price])


def goals(rows: dict[str, dict[str, Any]], runs: Runs) -> list[Goal]:
    def times(one: str, other: str) -> float:
        return median_ratio(runs[one], runs[other], of="seconds")

    ours = rows["thrifty halving"]
    halving, hyperband = runs["thrifty halving"][0], runs["thrifty Hyperband"][0]
    out = [
        equal(
            "halving: unique epochs against the exact minimum",
            halving["epochs"],
            halving["minimum"],
        ),
        equal(
            "Hyperband: unique epochs against the exact minimum",
            hyperband["epochs"],
            hyperband["minimum"],
        ),
        *(
            equal(
                f"{name}: epochs trained against the bare loop's",
                rows[f"thrifty {name}"]["epochs trained"],
                rows[f"bare {name}"]["epochs trained"],
            )
            for name in ("halving", "Hyperband")
        ),
        at_most("halving: thrifty / bare loop", times("thrifty halving", "bare halving"), 1.3),
        at_most(
            "Hyperband: thrifty / bare loop", times("thrifty Hyperband", "bare Hyperband"), 1.3
        ),
        *(
            at_least(
                f"{name}: packing further, end to end",
                times(f"thrifty {name}", f"thrifty packed {name}"),
                2,
            )
            for name in ("halving", "Hyperband")
        ),
        *(
            equal(
                f"{name}: epochs trained, packed",
                rows[f"thrifty packed {name}"]["epochs trained"],
                rows[f"thrifty {name}"]["epochs trained"],
            )
            for name in ("halving", "Hyperband")
        ),
        at_least("Optuna / thrifty", rows["Optuna"]["seconds"] / ours["seconds"], 10),
        at_least(
            "best accuracy against Optuna", ours["best accuracy"], rows["Optuna"]["best accuracy"]
        ),
    ]
    if "Ray Tune" in rows:
        ray = rows["Ray Tune"]
        out.append(at_least("Ray Tune / thrifty", ray["seconds"] / ours["seconds"], 30))
        out.append(
            at_least("best accuracy against Ray Tune", ours["best accuracy"], ray["best accuracy"])
        )
    return out


if __name__ == "__main__":
    main()
