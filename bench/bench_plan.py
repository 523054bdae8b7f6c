"""The search plan alone: insertions, decisions and memory up to a million trials.

    python -m bench.bench_plan [--quick]

Two workloads: *structural* (few schedules, very many values of another hyper-parameter: a wide forest) and *deep* (random
multi-step schedules that part again and again: a deep one).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from bench._harness import Goal, at_least, at_most, finish, in_fresh_process, say_result, table
from thrifty.core import CheckpointRef, EpochDone, StageDone
from thrifty.plan import Chain, SearchPlan
from thrifty.space import MultiStep, Step, Timeline


EPOCHS = 81
DECISIONS = 2000


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


WORKLOADS = {"structural": structural, "deep": deep}


def measure(workload: str, num: int) -> dict[str, Any]:
    """One size in this process: insertion with its request, then decisions among all that is pending."""
    configs = list(WORKLOADS[workload](num))
    process = psutil.Process()
    before = process.memory_info().rss
    plan = SearchPlan()
    began = time.perf_counter()
    for trial, config in enumerate(configs):
        plan.request(trial, plan.insert(Timeline(config, epochs=EPOCHS)), EPOCHS)
    seconds = time.perf_counter() - began
    held = process.memory_info().rss - before
    decisions, events = decide(plan, min(DECISIONS, num))
    return {
        "workload": workload,
        "trials": num,
        "trials_per_s": num / seconds,
        "bytes_per_trial": held / num,
        "nodes": len(plan.nodes),
        "merge_rate": num * EPOCHS / plan.num_epochs_needed,
        "decision_ms_median": float(np.median(decisions)) * 1e3,
        "decision_ms_p99": float(np.percentile(decisions, 99)) * 1e3,
        "decision_ms_max": max(decisions) * 1e3,
        "chain_recorded_ms_median": float(np.median(events)) * 1e3,
    }


def decide(plan: SearchPlan, num: int) -> tuple[list[float], list[float]]:
    """Takes chains and reports every other one as trained, so that branches open while others are pending."""
    decisions, events = [], []
    for index in range(num):
        began = time.perf_counter()
        chain = plan.next_chain()
        decisions.append(time.perf_counter() - began)
        if chain is None:
            break
        if index % 2:
            began = time.perf_counter()
            report(plan, chain)
            events.append(time.perf_counter() - began)
    return decisions, events


def report(plan: SearchPlan, chain: Chain) -> None:
    for s in chain.stages:
        for epoch in range(s.start + 1, s.stop + 1):
            plan.record(EpochDone(node=s.node, epoch=epoch, metrics={}, seconds=0.0, worker=""))
        ref = CheckpointRef(node=s.node, epoch=s.stop, path="", num_bytes=0, digest="")
        plan.record(
            StageDone(node=s.node, start=s.start, stop=s.stop, worker="", checkpoint=ref)
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument(
        "--one", nargs=2, metavar=("WORKLOAD", "TRIALS"), help="used by itself"
    )
    args = options.parse_args()
    if args.one:
        say_result(measure(args.one[0], int(args.one[1])))
        return
    sizes = (1_000, 10_000) if args.quick else (10_000, 100_000, 1_000_000)
    rows = [
        in_fresh_process("bench.bench_plan", "--one", workload, str(size))
        for workload in WORKLOADS
        for size in sizes
    ]
    table(rows)
    finish("plan", {"rows": rows}, goals(rows, sizes))


def goals(rows: list[dict[str, Any]], sizes: tuple[int, ...]) -> list[Goal]:
    out = []
    for workload in WORKLOADS:
        by_size = {row["trials"]: row for row in rows if row["workload"] == workload}
        large, middle = by_size[sizes[-1]], by_size[sizes[-2]]
        speed = middle["trials_per_s"] / large["trials_per_s"]
        slowest = min(row["trials_per_s"] for row in by_size.values())
        out += [
            at_least(f"{workload}: trials inserted a second, slowest size", slowest, 20_000),
            at_most(
                f"{workload}: worst decision in ms at {sizes[-2]:,}",
                middle["decision_ms_max"],
                5,
            ),
            at_most(f"{workload}: time a trial, {sizes[-1]:,} to {sizes[-2]:,}", speed, 1.5),
            at_most(
                f"{workload}: memory a trial, {sizes[-1]:,} to {sizes[-2]:,}",
                large["bytes_per_trial"] / middle["bytes_per_trial"],
                1.5,
            ),
        ]
    return out


if __name__ == "__main__":
    main()
