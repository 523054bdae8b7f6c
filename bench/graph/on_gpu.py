"""Training of a three-layer SAGE on a GPU: its own time beside that with batches from the loader.

*Alone*, the GPU trains on batches that it has already; what layers keep on their blocks is made
anew at each step. *Sent* gets batches with their features from the loader, *halves* the same in
bfloat16. *Kept* gets batches without features, which the GPU looks up in its own memory. *Made* is
a batch from the loader without training. Processes or threads make the loader's batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F

from bench.common.harness import Goal, at_least, table
from bench.graph.datasets import connected, rmat
from thrifty.graph import GNN, SAGE, Batch, Block, Graph, NeighborLoader


FANOUTS = [15, 10, 5]
HIDDEN = 256
NUM_CLASSES = 47
NUM_HELD = 16
"""Batches that the GPU holds while it trains alone."""
NUM_TIMED = 20
"""Steps that are timed together, after which the GPU is waited for."""
NUM_UNTIMED = 4
"""First steps, which fill the loader's queue."""

Way = Callable[[], Iterable[Batch]]


def on_gpu(
    *,
    quick: bool,
    rounds: int,
    device: str,
    scale: int = 20,
    num_edges: int = 20_000_000,
    batch_size: int = 1024,
) -> tuple[dict[str, Any], list[Goal]]:
    """Return milliseconds of a step in each way, and the goals."""
    if quick:
        scale, num_edges = 14, 200_000
    began = time.perf_counter()
    graph = rmat(scale, num_edges, num_features=100, num_classes=NUM_CLASSES)
    built_s = time.perf_counter() - began
    print(f"R-MAT, {num_edges:,} edges: built in {built_s:.1f} s", flush=True)
    assert graph.x is not None
    threads = max((os.cpu_count() or 2) - 2, 1)
    options: dict[str, Any] = {
        "seeds": connected(graph),
        "batch_size": batch_size,
        "num_threads": threads,
        "depth": 2 * threads,
        "device": device,
    }
    graphs = {
        "sent": graph,
        "halves": graph.replace(x=graph.x.bfloat16()),
        "kept": Graph(graph.indptr, graph.indices, y=graph.y, check=False),
    }
    loaders = {
        (name, how): NeighborLoader(each, FANOUTS, processes=how == "processes", **options)
        for name, each in graphs.items()
        for how in ("processes", "threads")
    }
    num = min(NUM_UNTIMED + (5 if quick else 10 * NUM_TIMED), len(loaders["sent", "threads"]))
    held = list(islice(loaders["sent", "threads"], NUM_HELD))
    after: dict[str, Callable[[Iterable[Batch]], Iterable[Batch]]] = {
        "sent": iter,
        "halves": _widened,
        "kept": partial(_kept, graph.x.to(device)),
    }

    def way(name: str, how: str) -> Way:
        return lambda: after[name](islice(loaders[name, how], num))

    ways: dict[tuple[str, str], Way] = {
        ("alone", ""): lambda: (_fresh(held[i % len(held)]) for i in range(num)),
        **{key: way(*key) for key in loaders},
    }
    for how in ("processes", "threads"):
        ways["made", how] = partial(islice, loaders["sent", how], num)
    step = _trainer(graph.num_features, device)
    found: dict[tuple[str, str], _Times] = {key: _Times() for key in ways}
    for number in range(1 + rounds):
        for key, batches in ways.items():
            times = _time(batches(), step if key[0] != "made" else lambda _: None)
            if number:  # the first round warms up
                found[key].add(times)
    rows = [{"batches": name, "by": how, **times.figures()} for (name, how), times in found.items()]
    table(rows)
    nodes = median(len(batch.nodes) for batch in held)
    figures = {
        "steps": rows,
        "nodes in a batch": nodes,
        "MB of features in a batch": nodes * graph.num_features * 4 / 1e6,
        "workers": threads,
        "edges": num_edges,
        "seconds to build the graph": built_s,
    }
    ms = {key: median(times.steps) for key, times in found.items()}
    goal = f"{num_edges:,} edges: GPU alone / with the loader (kept, processes)"
    return figures, [at_least(goal, ms["alone", ""] / ms["kept", "processes"], 0.95)]


def _widened(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        assert batch.x is not None
        yield replace(batch, x=batch.x.float())


def _kept(features: torch.Tensor, batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield replace(batch, x=features.index_select(0, batch.nodes))


def _fresh(batch: Batch) -> Batch:
    """Return the batch with nothing that layers have kept on its blocks."""
    blocks = (Block(b.indptr, b.indices, num_src=b.num_src) for b in batch.blocks)
    return replace(batch, blocks=tuple(blocks))


def _trainer(num_features: int, device: str) -> Callable[[Batch], None]:
    sizes = [num_features, HIDDEN, HIDDEN, NUM_CLASSES]
    model = GNN([SAGE(a, b) for a, b in pairwise(sizes)], dropout=0.5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=device != "cpu")

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch.y).backward()
        optimizer.step()

    return step


class _Times:
    """Milliseconds of steps, and those of them in which the trainer gets its batch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.gets: list[float] = []

    def add(self, other: _Times) -> None:
        self.steps += other.steps
        self.gets += other.gets

    def figures(self) -> dict[str, float]:
        low, middle, high = (
            quantiles(self.steps, n=4) if len(self.steps) > 1 else 3 * [self.steps[0]]
        )
        return {
            "ms": middle,
            "lower quartile": low,
            "upper quartile": high,
            "ms to get a batch": median(self.gets),
        }


def _time(batches: Iterable[Batch], step: Callable[[Batch], None]) -> _Times:
    times = _Times()
    iterator = iter(batches)
    for batch in islice(iterator, NUM_UNTIMED):
        step(batch)
    _wait()
    while True:
        began = time.perf_counter()
        num, got_s = 0, 0.0
        for _ in range(NUM_TIMED):
            asked = time.perf_counter()
            got = next(iterator, None)
            if got is None:
                break
            got_s += time.perf_counter() - asked
            step(got)
            num += 1
        _wait()
        if num == NUM_TIMED or (num and not times.steps):
            times.steps.append((time.perf_counter() - began) / num * 1e3)
            times.gets.append(got_s / num * 1e3)
        if num < NUM_TIMED:
            return times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
