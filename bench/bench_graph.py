"""Graph training: sampling, batch preparation, training steps, inference, a packed study, scaling.

    python -m bench.bench_graph [--quick] [--repeats 5]
        [--only sampling,preparation,training,inference,study,scaling]
    python -m bench.bench_graph --device cuda [--edges 20,200]

Graphs are an R-MAT graph of 2^20 nodes and 20 million edges with 100 random features (batches of
1,024 seeds, fanouts (15, 10, 5)), Coauthor CS (the first 128 components of its features) and Amazon
Computers. Peers (DGL 1.1.3: ``pip install --no-deps dgl==1.1.3``; PyG's loader where its sampler
library is there) alternate with ours, in the same process. *Frontier* expands each node once (PyG);
*full* expands all nodes at each hop (DGL, SALIENT), which gives more edges, so only like is
compared with like. Whole steps are measured in processes of their own, with the default memory
allocation, and with ``tune_allocator`` for all contenders.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.common.harness import Goal, at_least, at_most, finish, parser, table
from bench.common.processes import in_fresh_process
from bench.graph.datasets import connected, real, rmat
from bench.graph.on_gpu import on_gpu
from bench.graph.peers import DGL_INSTALL, dgl, pyg_samples
from bench.graph.sampling import memory_bounds, preparation, sampling
from bench.graph.scaling import inference, scaling
from bench.graph.training import loss_difference


FANOUTS = [15, 10, 5]
BATCH_SIZE = 1024
THREADS = 2
SECTIONS = ("sampling", "preparation", "training", "inference", "study", "scaling")
SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=5)
    options.add_argument("--only", default="", help="a few sections, with commas between")
    options.add_argument("--device", default="cpu", help="cuda: the loader beside a GPU, only")
    options.add_argument("--edges", default="20,200", help="with --device: millions of edges")
    args = options.parse_args()
    if args.device != "cpu":
        _on_gpu(args.device, quick=args.quick, rounds=args.repeats, edges=args.edges)
        return
    sections = args.only.split(",") if args.only else list(SECTIONS)
    torch.set_num_threads(THREADS)
    rounds = 1 if args.quick else args.repeats
    figures: dict[str, Any] = {"peers": _peers()}
    goals: list[Goal] = []
    for section in sections:
        found, judged = _SECTIONS[section](quick=args.quick, rounds=rounds)
        figures[section] = found
        goals += judged
    finish("graph", figures, goals)


def _on_gpu(device: str, *, quick: bool, rounds: int, edges: str) -> None:
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for millions in map(int, edges.split(",")):
        found, judged = on_gpu(
            quick=quick,
            rounds=1 if quick else rounds,
            device=device,
            scale=20 if millions <= 20 else 23,
            num_edges=millions * 1_000_000,
        )
        figures[f"{millions} million edges"] = found
        goals += judged
    finish("graph", figures, goals)


def _peers() -> dict[str, str]:
    library = dgl()
    out = {
        "DGL": f"not there ({DGL_INSTALL})" if library is None else str(library.__version__),
        "PyG NeighborLoader": pyg_samples() or "there",
    }
    for name, state in out.items():
        print(f"{name}: {state}")
    return out


def _big(*, quick: bool) -> tuple[int, int]:
    return (14, 200_000) if quick else (20, 20_000_000)


Section = tuple[Any, list[Goal]]


def _sampling(*, quick: bool, rounds: int) -> Section:
    graph = rmat(*_big(quick=quick))
    seeds = np.random.default_rng(1).permutation(connected(graph))
    num = 2 if quick else 10
    rows = sampling(
        graph, seeds[: num * BATCH_SIZE], fanouts=FANOUTS, batch_size=BATCH_SIZE, rounds=2 * rounds
    )
    table(rows)
    bounds = memory_bounds(graph)
    speed = {row["sampler, 1 thread"]: row["million edges/s"] for row in rows}
    # Each edge takes two reads of memory, the neighbour and its entry in the table.
    bounds["edges/s if each read waited, million"] = 1e3 / (2 * bounds["dependent read, ns"])
    bounds["edges/s if no read waited, million"] = 1e3 / (2 * bounds["independent read, ns"])
    for name, value in bounds.items():
        print(f"{name}: {value:,.1f}")
    goals = []
    if "DGL, full" in speed:
        goals.append(
            at_least("sampling, full: ours / DGL", speed["ours, full"] / speed["DGL, full"], 4)
        )
    if "C++ twin, frontier" in speed:
        ratio = speed["ours, frontier"] / speed["C++ twin, frontier"]
        goals.append(at_least("sampling, frontier: ours / C++ twin", ratio, 0.85))
    return {"samplers": rows, "memory": bounds}, goals


def _preparation(*, quick: bool, rounds: int) -> Section:
    graph = rmat(*_big(quick=quick), num_features=100)
    seeds = np.random.default_rng(1).permutation(connected(graph))
    num = 2 if quick else 12
    rows = preparation(
        graph, seeds[: num * BATCH_SIZE], fanouts=FANOUTS, batch_size=BATCH_SIZE, rounds=2 * rounds
    )
    print()
    table(rows)
    ms = {row["loader"]: row["ms a batch"] for row in rows}
    goals = []
    if "DGL DataLoader, full, 2 threads" in ms:
        ratio = ms["DGL DataLoader, full, 2 threads"] / ms["ours, full, 2 threads"]
        goals.append(at_least("preparation, full, 2 threads: DGL / ours", ratio, 5))
    if "PyG NeighborLoader, frontier" in ms:
        ratio = ms["PyG NeighborLoader, frontier"] / ms["ours, frontier, 2 threads"]
        goals.append(at_least("preparation, frontier, 2 threads: PyG / ours", ratio, 6))
    return rows, goals


def _training(*, quick: bool, rounds: int) -> Section:
    rows = []
    for name, hidden, tuned, dropout in [
        *product(("rmat", "amazon_cs", "coauthor_cs"), (256, 64), (False, True), (0.5,)),
        # Without dropout, because PyTorch's own dropout costs the peer time.
        *product(("rmat",), (256, 64), (False,), (0.0,)),
    ]:
        options = {
            "graph": name,
            "size": _big(quick=quick),
            "fanouts": FANOUTS,
            "batch_size": BATCH_SIZE,
            "hidden": hidden,
            "dropout": dropout,
            "batches": 1 if quick else 8,
            "rounds": min(rounds, 3),
            "tuned": tuned,
            "threads": THREADS,
        }
        found = in_fresh_process("bench.graph.training", json.dumps(options))
        found.pop("peak_mb")
        rows.append({
            "graph": name,
            "hidden": hidden,
            "dropout": dropout,
            "allocator": "tuned" if tuned else "default",
            **found,
        })
    print()
    table(rows)
    worst = loss_difference(real("coauthor_cs", num_components=128), steps=50, hidden=64)
    print(f"largest difference of the first 50 losses from dense matrices: {worst:.1e}")
    goals = [at_most("largest difference of the first 50 losses", worst, 1e-4)]
    for row in rows:
        if "DGL, full" in row and row["graph"] == "rmat":
            goal = 1.4 if row["hidden"] == 256 else 1.8
            for mode in ("full", "frontier"):
                what = (
                    f"hidden {row['hidden']}, dropout {row['dropout']}, {mode}, "
                    f"{row['allocator']} allocator"
                )
                name = f"step, {what}: DGL / ours"
                goals.append(at_least(name, row["DGL, full"] / row[f"ours, {mode}"], goal))
    return {"ms of a step": rows, "loss difference": worst}, goals


def _inference(*, quick: bool, **_: Any) -> Section:
    rows = [
        inference(
            name,
            num_components=num_components,
            seeds=1 if quick else 3,
            epochs=1 if quick else epochs,
            hidden=256,
        )
        for name, num_components, epochs in (
            ("coauthor_cs", 128, 10),
            ("amazon_cs", 128, 30),
            ("amazon_cs", 0, 30),
        )
    ]
    print()
    table(rows)
    return rows, [
        at_most(
            (
                f"{row['graph']}, {row['features']} features: sampled and full inference "
                f"differ by (points)"
            ),
            row["difference of means"],
            0.3,
        )
        for row in rows
    ]


def _study(*, quick: bool, rounds: int) -> Section:
    rows: list[dict[str, Any]] = []
    goals = []
    for hidden, tuned in product((64, 16), (False, True)):
        found = _sixteen_trials(hidden, tuned=tuned, quick=quick, rounds=min(rounds, 2))
        rows += found
        fastest = max(row["times as fast"] for row in found[1:])
        allocator = "tuned" if tuned else "default"
        name = (
            f"16 trials, hidden {hidden}, {allocator} allocator, "
            "packed with shared batches: times as fast"
        )
        goals.append(at_least(name, fastest, 3))
    print()
    table(rows)
    return rows, goals


def _sixteen_trials(hidden: int, *, tuned: bool, quick: bool, rounds: int) -> list[dict[str, Any]]:
    common = {
        "graph": "amazon_cs",
        "fanouts": FANOUTS,
        "hidden": hidden,
        "batch_size": BATCH_SIZE,
        "num_valid": 256 if quick else 2048,
        "epochs": 1 if quick else 5,
        "threads": THREADS,
        "tuned": tuned,
    }
    packed = {"how": "packed", "pack": "auto"}
    ways: dict[str, dict[str, Any]] = {
        "one after the other": {"how": "alone"},
        "study, packs of 16": {**packed, "workers": 1, "pack_size": 16},
        "study, two workers, packs of 8": {**packed, "workers": 2, "pack_size": 8},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            found = in_fresh_process("bench.graph.study", json.dumps({**common, **way}))
            seconds[name].append(found["seconds"])
            best[name] = found["best"]
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return [
        {
            "16 trials": name,
            "hidden": hidden,
            "allocator": "tuned" if tuned else "default",
            "seconds": value,
            "times as fast": medians["one after the other"] / value,
            "best accuracy": best[name],
        }
        for name, value in medians.items()
    ]


def _scaling(*, quick: bool, **_: Any) -> Section:
    rows = scaling(SIZES[:2] if quick else SIZES, fanouts=FANOUTS, batches=3 if quick else 20)
    print()
    table(rows)
    return rows, []


_SECTIONS = {
    "sampling": _sampling,
    "preparation": _preparation,
    "training": _training,
    "inference": _inference,
    "study": _study,
    "scaling": _scaling,
}


if __name__ == "__main__":
    main()
