"""Training of a three-layer SAGE on a GPU: its own time beside that with batches from the loader.

*Alone*, the GPU trains again and again on batches that it has already. *Sent* gets batches with
their features from the loader. *Kept* gets batches without features, which the GPU looks up in its
own memory. *Made* is a batch from the loader that nobody trains on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench.common.harness import Goal, at_least, table
from bench.graph.datasets import connected, rmat
from thrifty.graph import GNN, SAGE, Batch, Graph, NeighborLoader


FANOUTS = [15, 10, 5]
HIDDEN = 256
NUM_CLASSES = 47
NUM_HELD = 16
"""Batches that the GPU holds while it trains alone."""


def on_gpu(
    *, quick: bool, rounds: int, device: str, scale: int = 20, num_edges: int = 20_000_000
) -> tuple[dict[str, Any], list[Goal]]:
    """Return milliseconds of a step in each way, and the goals."""
    if quick:
        scale, num_edges = 14, 200_000
    graph = rmat(scale, num_edges, num_features=100, num_classes=NUM_CLASSES)
    threads = max((os.cpu_count() or 2) - 2, 1)
    options: dict[str, Any] = {
        "seeds": connected(graph),
        "batch_size": 1024,
        "num_threads": threads,
        "depth": 2 * threads,
        "device": device,
    }
    whole = NeighborLoader(graph, FANOUTS, **options)
    bare = NeighborLoader(Graph(graph.indptr, graph.indices, y=graph.y), FANOUTS, **options)
    assert graph.x is not None
    features = graph.x.to(device)
    num = min(10 if quick else 200, len(whole))

    def kept(batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield replace(batch, x=features.index_select(0, batch.nodes))

    held = list(islice(whole, NUM_HELD))
    step = _trainer(graph.num_features, device)
    ways: dict[str, Callable[[], Iterable[Batch]]] = {
        "alone": lambda: (held[i % len(held)] for i in range(num)),
        "sent": lambda: islice(whole, num),
        "kept": lambda: kept(islice(bare, num)),
        "made": lambda: islice(bare, num),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + rounds):
        for way, batches in ways.items():
            taken = _time(batches(), step if way != "made" else lambda _: None)
            if number:  # the first round warms up
                times[way].append(taken)
    found = {way: median(values) for way, values in times.items()}
    nodes = median(len(batch.nodes) for batch in held)
    figures = {
        "ms": found,
        "nodes in a batch": nodes,
        "MB of features in a batch": nodes * graph.num_features * 4 / 1e6,
        "threads": threads,
        "edges": num_edges,
    }
    table([{"graph": f"R-MAT, {num_edges:,} edges", **{f"{w}, ms": t for w, t in found.items()}}])
    best = min(found["sent"], found["kept"])
    goals = [
        at_least(f"{num_edges:,} edges: GPU alone / with the loader", found["alone"] / best, 0.95)
    ]
    return figures, goals


def _trainer(num_features: int, device: str) -> Callable[[Batch], None]:
    sizes = [num_features, HIDDEN, HIDDEN, NUM_CLASSES]
    model = GNN([SAGE(a, b) for a, b in pairwise(sizes)], dropout=0.5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=device != "cpu")

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), batch.y).backward()
        optimizer.step()

    return step


def _time(batches: Iterable[Batch], step: Callable[[Batch], None]) -> float:
    """Return milliseconds of a step, after the first few, which fill the loader's queue."""
    began, num = 0.0, 0
    for number, batch in enumerate(batches):
        if number == 4:
            _wait()
            began = time.perf_counter()
        step(batch)
        num = number - 3
    _wait()
    return (time.perf_counter() - began) / num * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
