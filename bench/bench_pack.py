"""K trials in one process: thrifty's packs beside plain loops, processes and ``torch.vmap``.

    python -m bench.bench_pack [--quick] [--repeats 3] [--models mlp,lenet] [--speed-only]
    python -m bench.bench_pack --device cuda [--limit 80] [--models mlp,gpt] [--methods vmap]

It also shows how precise packs are. On the CPU each method gets two cores: two processes of one
thread, or one process of two; *1 thread* says otherwise. Each measurement has a fresh process. All
methods of a round follow each other, and ratios are the median of the rounds' ratios. On a GPU each
model has a process and a time limit (``bench.pack.on_gpu``).
"""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any
from unittest import mock

import torch

from bench.common.harness import Goal, at_least, at_most, finish, parser, table
from bench.common.long_study import long_row
from bench.common.processes import RESULT, in_fresh_process
from bench.pack import on_gpu, precision


OURS, PEERS, PRECISION = "bench.pack.ours", "bench.pack.peers", "bench.pack.precision"
PRODUCTS, LONG = "bench.pack.products", "bench.common.long_study"
SECONDS = 1.5
Run = Callable[..., dict[str, Any]]
Results = Mapping[str, Mapping[str, Any]]


# -- the CPU -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """K trials of a workload.

    A core trains about ``rate`` steps of them in a second, and packed ``gain`` times as many.
    """

    workload: str
    k: int
    rate: int
    gain: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.workload}, K={self.k}"

    def steps(self, gain: float = 1.0) -> int:
        """Return how many steps of each trial take long enough to be measured."""
        return max(5, round(SECONDS * self.rate * gain / self.k))


STUDIES = (
    Study(workload="mlp", k=16, rate=2800, gain=5),
    Study(workload="mlp", k=32, rate=2800, gain=5),
    Study(workload="mlp_adamw", k=16, rate=900, gain=5),
    Study(workload="mlp_narrow16", k=16, rate=4000, gain=6),
    Study(workload="mlp_narrow32", k=16, rate=3500, gain=6),
    Study(workload="mlp_narrow64", k=16, rate=3500, gain=6),
    Study(workload="mlp_wide", k=16, rate=150),
    Study(workload="lenet", k=8, rate=90),
    Study(workload="resnet20", k=4, rate=8),
    Study(workload="transformer", k=8, rate=40),
    Study(workload="sage", k=8, rate=130),
)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32)
METHODS = (
    "ours",
    "sequential",
    "two processes",
    "ours, 1 thread",
    "sequential, 1 thread",
    "vmap, 1 thread",
)
Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Results by study and method, one for each round."""


def measure(study: Study, method: str, *, run: Run, quick: bool) -> dict[str, Any]:
    """Make one measurement: trial-steps per second, and what else the method reports."""
    packed = method.startswith("ours")
    steps = 2 if quick else study.steps(study.gain if packed else 1.0)
    size = [study.workload, str(2 if quick else study.k), str(steps)]
    sizes = ["--sizes", "1"] if quick else []
    module, args = {
        "ours": (OURS, ["auto", *size, "--processes", "2", *sizes]),
        "ours, 1 thread": (OURS, ["auto", *size, "--processes", "1", *sizes]),
        "sequential": (PEERS, ["sequential", *size, "2"]),
        "sequential, 1 thread": (PEERS, ["sequential", *size, "1"]),
        "two processes": (PEERS, ["processes", *size, "1"]),
        "vmap, 1 thread": (PEERS, ["vmap", *size, "1"]),
    }[method]
    return run(module, *args)


def speed(studies: Sequence[Study], *, run: Run, rounds: int, quick: bool) -> Runs:
    runs: Runs = {study.name: {method: [] for method in METHODS} for study in studies}
    for number, study, method in product(range(rounds), studies, METHODS):
        result = measure(study, method, run=run, quick=quick)
        runs[study.name][method].append(result)
        said = "does not work" if result["rate"] is None else f"{result['rate']:,.0f} steps/s"
        print(f"{number + 1}: {study.name}: {method}: {said}", flush=True)
    return runs


def block_sizes(workloads: Iterable[str], *, run: Run, quick: bool) -> list[dict[str, Any]]:
    """Measure the microseconds of a trial-step by the size of a block: one process, one thread."""
    out = []
    sizes = BLOCK_SIZES[:1] if quick else BLOCK_SIZES
    limits = ["--seconds", "0" if quick else "0.5", "--max-step", "0.5"]
    for workload in workloads:
        asked = ",".join(map(str, sizes))
        found = run(OURS, "sweep", workload, asked, *limits)
        rates = {int(k): rate for k, rate in found["rates"].items()}
        times = {f"{k}": 1e6 / rates[k] if k in rates else None for k in sizes}
        out.append({"us of a trial-step, fused": workload, **times, "ended": found["ended"]})
    return out


def speed_rows(runs: Runs) -> list[dict[str, Any]]:
    out = []
    for name, methods in runs.items():
        ours = methods["ours"]
        one = methods["ours, 1 thread"]
        out.append({
            "trial-steps/s": name,
            **{method: _rate(results) for method, results in methods.items()},
            "ours / sequential": _ratio(methods, "ours", "sequential"),
            "ours / two processes": _ratio(methods, "ours", "two processes"),
            "1 thread": _ratio(methods, "ours, 1 thread", "sequential, 1 thread"),
            "chosen": " | ".join(dict.fromkeys(r["choice"] for r in (*ours, *one))),
            "calibration s": median(r["calibration_s"] for r in ours),
            "checks_share": median(r["checks_share"] for r in ours),
        })
    return out


def _rate(results: Sequence[Mapping[str, Any]]) -> float | None:
    rates = [r["rate"] for r in results if r["rate"] is not None]
    return median(rates) if rates else None


def _ratio(methods: Mapping[str, Sequence[Mapping[str, Any]]], one: str, *others: str) -> float:
    """Return the ratio to the fastest of the others, round by round.

    Neighbouring runs saw the same machine.
    """
    rounds = zip(methods[one], *(methods[other] for other in others), strict=True)
    return median(a["rate"] / max(b["rate"] for b in rest) for a, *rest in rounds)


def speed_goals(runs: Runs) -> list[Goal]:
    out = []
    for name, methods in runs.items():
        workload = name.partition(",")[0]
        sequential = _ratio(methods, "ours", "sequential")
        best = _ratio(methods, "ours", "sequential", "two processes")
        alone = _ratio(methods, "ours", "two processes")
        single = _ratio(methods, "ours, 1 thread", "sequential, 1 thread")
        if workload == "mlp":
            out += [
                at_least(f"{name}: ours / sequential", sequential, 4),
                at_least(f"{name}: ours / sequential, long study", sequential, 8),
                at_least(f"{name}: ours / two processes", alone, 5),
                at_least(f"{name}: ours / sequential, 1 thread both", single, 4),
            ]
        elif workload == "mlp_adamw":
            out.append(at_least(f"{name}: ours / sequential", sequential, 5))
        elif workload.startswith("mlp_narrow"):
            out.append(at_least(f"{name}: ours / sequential", sequential, 6))
        else:
            out.append(at_least(f"{name}: ours / the better of both", best, 0.97))
            if workload == "resnet20":
                out.append(at_least(f"{name}: gain of packing", best, 1.1))
    return out


def on_cpu(*, quick: bool, rounds: int, models: Sequence[str], speed_only: bool) -> None:
    run: Run = _in_this_process if quick else in_fresh_process
    studies = [s for s in STUDIES if not models or s.workload in models]
    subjects = [s for s in precision.SUBJECTS if not models or s in models]
    runs = speed(studies, run=run, rounds=1 if quick else rounds, quick=quick)
    if speed_only:
        rows = {"speed": speed_rows(runs)}
        _tables(rows)
        finish("pack", {"rows": rows, "runs": runs}, speed_goals(runs))
        return
    curves = block_sizes(dict.fromkeys(s.workload for s in studies), run=run, quick=quick)
    flags = ["--quick"] if quick else []
    results: Results = {subject: run(PRECISION, subject, *flags) for subject in subjects}
    asks_mlp = any(s.workload == "mlp" for s in studies)
    long = [run(LONG, "pack", *flags) for _ in range(1 if quick else rounds)]
    rows = {
        "speed": speed_rows(runs),
        "study of a minute": [long_row(result) for result in long],
        "block sizes": curves,
        "products of mlp alone": _products(run(PRODUCTS, *flags)) if asks_mlp else [],
        "precision": precision.rows(results),
    }
    _tables(rows)
    if "digits" in results:
        digits = results["digits"]
        error = f"{digits['standard_error']:.2g}"
        print(f"digits: packed - solo = {digits['difference']:.2g} +- {error} in accuracy")
    figures = {"rows": rows, "runs": runs, "precision": results, "long": long}
    share = median(result["checks_share"] for result in long)
    price = at_most("a study of a minute: checks_share", share, 0.02)
    finish("pack", figures, [*speed_goals(runs), *precision.goals(results), price])


def _products(found: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"products of mlp alone": what, "1 thread": value} for what, value in found.items()]


def _in_this_process(module: str, *args: str) -> dict[str, Any]:
    """Run as ``in_fresh_process`` does, but in this process, for smoke runs.

    That saves the seconds that a process takes to start.
    """
    out = io.StringIO()
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([PRECISION, "torch._dynamo"])  # the slow imports
    with (
        mock.patch.object(sys, "argv", [module, *args]),
        mock.patch("multiprocessing.get_context", return_value=server),
        redirect_stdout(out),
    ):
        import_module(module).main()
    return json.loads(out.getvalue().splitlines()[-1].removeprefix(RESULT))


# -- both --------------------------------------------------------------------------------


def _tables(rows: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    for part in rows.values():
        if part:
            print()
            table(part)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--limit", type=float, default=80.0, help="on a GPU: seconds of a model")
    options.add_argument(
        "--methods", default="", help="on a GPU: parts of names of methods, such as vmap,processes"
    )
    options.add_argument("--models", default="", help="a few of them, with commas between")
    options.add_argument(
        "--speed-only",
        action="store_true",
        help="on a CPU: no sizes of blocks, precision and study of a minute",
    )
    args = options.parse_args()
    models = [model for model in args.models.split(",") if model]
    if args.device == "cpu":
        on_cpu(quick=args.quick, rounds=args.repeats, models=models, speed_only=args.speed_only)
    else:
        if not torch.cuda.is_available():
            sys.exit(
                f"--device {args.device}: PyTorch {torch.__version__} sees no CUDA device here; "
                "run this on a machine with one and a build of PyTorch for it, or leave --device "
                "out to measure the CPU"
            )
        on_gpu.run(
            models=models, device=args.device, quick=args.quick, limit_s=args.limit,
            methods=[part for part in args.methods.split(",") if part],
        )  # fmt: skip


if __name__ == "__main__":
    main()
