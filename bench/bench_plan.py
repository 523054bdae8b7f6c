"""The search plan alone: insertions, decisions and memory up to a million trials.

    python -m bench.bench_plan [--quick] [--repeats 1]

There are three workloads:

- *structural*: few schedules and very many values of another hyper-parameter, a wide forest.
- *deep*: random multi-step schedules that diverge again and again.
- *fan*: one trunk that a hundred thousand trials leave, each to a value of its own.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.common.harness import Goal, at_least, at_most, finish, parser, table
from bench.common.processes import in_fresh_process, say_result
from thrifty.core import CheckpointRef, EpochDone, Event, StageDone
from thrifty.plan import Chain, SearchPlan
from thrifty.space import MultiStep, Step, Timeline


EPOCHS = 81
DECISIONS = 2000
WORKERS = 8
Configs = Sequence[dict[str, Any]]


def structural(num: int) -> Iterator[dict[str, Any]]:
    schedules = [
        Step(lr, [first, first + gap], gamma=gamma)
        for lr in (0.1, 0.05, 0.02)
        for first in (10, 20, 30, 40)
        for gap in (5, 20, 40)
        for gamma in (0.1, 0.3)
        if first + gap < EPOCHS
    ]
    for i in range(num):
        yield {"lr": schedules[i % len(schedules)], "width": i // len(schedules), "decay": 1e-4}


def deep(num: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for _ in range(num):
        cuts = np.sort(rng.choice(np.arange(1, EPOCHS // 5), size=4, replace=False)) * 5
        levels = rng.integers(0, 6, size=5).tolist()
        yield {"lr": MultiStep(levels, milestones=cuts.tolist()), "width": 64}


def fan(num: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    values, drops = rng.random(num).tolist(), (5 * rng.integers(1, 16, size=num)).tolist()
    for value, drop in zip(values, drops, strict=True):
        yield {"lr": MultiStep([0.1, value], milestones=[drop]), "width": 64}


WORKLOADS = {"structural": structural, "deep": deep, "fan": fan}


@dataclass
class Clocked:
    """Calls by kind, and the seconds that each took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, kind: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        out = call()
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)
        return out

    def ms(self, kind: str) -> dict[str, float]:
        all_ms = np.array(self.seconds[kind]) * 1e3
        return {
            f"{kind}_ms_median": float(np.median(all_ms)),
            f"{kind}_ms_p99": float(np.percentile(all_ms, 99)),
            f"{kind}_ms_max": float(all_ms.max()),
        }


class Pauses:
    """The longest pause for Python's garbage collection, which affects any call in progress."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.longest_s = max(self.longest_s, time.perf_counter() - self._began)


def measure(workload: str, num: int) -> dict[str, Any]:
    """Measure one size in this process.

    It inserts each trial with its request, then decides among all that is pending.
    """
    configs = list(WORKLOADS[workload](num))
    process = psutil.Process()
    before = process.memory_info().rss
    plan = SearchPlan()
    node_of = []
    began = time.perf_counter()
    for trial, config in enumerate(configs):
        node = plan.insert(Timeline(config, epochs=EPOCHS))
        plan.request(trial, node, EPOCHS)
        node_of.append(node)
    seconds = time.perf_counter() - began
    held = process.memory_info().rss - before
    out = {
        "workload": workload,
        "trials": num,
        "trials_per_s": num / seconds,
        "bytes_per_trial": held / num,
        "nodes": len(plan.nodes),
        "merge_rate": num * EPOCHS / plan.num_epochs_needed,
        "pending": num_pending(plan),
    }
    clocked = Clocked()
    with Pauses() as pauses:
        work(plan, node_of, clocked=clocked, num=min(DECISIONS, num // 4))
    out["gc_pause_ms_max"] = pauses.longest_s * 1e3
    out["pending_after"] = num_pending(plan)
    for trial in range(0, num, 2):
        plan.release(trial, node_of[trial], EPOCHS)
    for _ in range(100):
        clocked("after_mass_release", plan.next_chain)
    for kind in ("decision", "event", "change", "after_mass_release"):
        out |= clocked.ms(kind)
    return out


def num_pending(plan: SearchPlan) -> int:
    """Count stages that no worker has begun: each ends at a request for metrics or a branch."""
    return sum(len(node.wants()) for node in plan.nodes if node.running is None)


def work(plan: SearchPlan, node_of: Sequence[int], *, clocked: Clocked, num: int) -> None:
    """Simulate a study with several workers; events follow every decision.

    Between decisions the longest running chain reports all its epochs and stages, and one trial is
    taken back and requested again with fewer epochs.
    """
    rng = np.random.default_rng(1)
    trials = rng.choice(len(node_of), size=num, replace=False).tolist()
    running: deque[Chain] = deque()
    for trial in trials:
        chain = clocked("decision", plan.next_chain)
        assert chain is not None or running, "nothing can start although much is pending"
        if chain is not None:
            running.append(chain)
        # Nothing can start: let running chains finish.
        if chain is None or len(running) == WORKERS:
            done = running.popleft()
            for event in events_of(done):
                clocked("event", partial(plan.record, event))
            clocked("event", partial(plan.abandon, done))
        node = node_of[trial]
        clocked("change", partial(plan.release, trial, node, EPOCHS))
        clocked("change", partial(plan.request, trial, node, EPOCHS // 2))


def events_of(chain: Chain) -> Iterator[Event]:
    for s in chain.stages:
        for epoch in range(s.start + 1, s.stop + 1):
            yield EpochDone(node=s.node, epoch=epoch, metrics={}, seconds=0.0, worker="")
        ref = CheckpointRef(node=s.node, epoch=s.stop, path="", num_bytes=0, digest="")
        yield StageDone(node=s.node, start=s.start, stop=s.stop, worker="", checkpoint=ref)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=1)
    options.add_argument("--one", nargs=2, metavar=("WORKLOAD", "TRIALS"), help="used by itself")
    args = options.parse_args()
    if args.one:
        say_result(measure(args.one[0], int(args.one[1])))
        return
    sizes = (1_000, 10_000) if args.quick else (10_000, 100_000, 1_000_000)
    runs = [
        [
            in_fresh_process("bench.bench_plan", "--one", workload, str(size))
            for workload in WORKLOADS
            for size in sizes
        ]
        for _ in range(args.repeats)
    ]
    rows = [middle(same) for same in zip(*runs, strict=True)]
    show(rows)
    finish("plan", {"rows": rows, "repeats": args.repeats}, goals(rows, sizes))


def middle(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the repeats; a worst case stays the worst of all."""
    out = dict(same[0])
    for name, value in same[0].items():
        if isinstance(value, float):
            pick = max if name.endswith("_max") else median
            out[name] = pick(row[name] for row in same)
    return out


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print two tables, as one would be too wide: insertion, and what follows it."""
    for wanted in (False, True):
        table([
            {
                name: value
                for name, value in row.items()
                if name in ("workload", "trials") or ("_ms_" in name) == wanted
            }
            for row in rows
        ])
        print()


def goals(rows: list[dict[str, Any]], sizes: tuple[int, ...]) -> list[Goal]:
    out = []
    for workload in WORKLOADS:
        by_size = {row["trials"]: row for row in rows if row["workload"] == workload}
        large, mid = by_size[sizes[-1]], by_size[sizes[-2]]
        time_growth = mid["trials_per_s"] / large["trials_per_s"]
        memory_growth = large["bytes_per_trial"] / mid["bytes_per_trial"]
        slowest = min(row["trials_per_s"] for row in by_size.values())
        sizes_text = f"{sizes[-1]:,} against {sizes[-2]:,}"
        out += [
            at_least(f"{workload}: trials inserted a second, slowest size", slowest, 20_000),
            at_least(f"{workload}: stages pending at decisions", mid["pending"], sizes[-2]),
            at_most(f"{workload}: time a trial, {sizes_text}", time_growth, 1.5),
            at_most(f"{workload}: memory a trial, {sizes_text}", memory_growth, 1.5),
        ]
        out += [
            at_most(
                f"{workload}: decision in ms, {what}, {sizes[-2]:,} trials",
                mid[f"decision_ms_{what}"],
                5,
            )
            for what in ("median", "p99", "max")
        ]
    return out


if __name__ == "__main__":
    main()
