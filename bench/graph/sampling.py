"""Sampling and batch preparation: ours, a C++ twin, DGL, and PyG where it can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numba
import numpy as np
import torch

from bench.common.harness import interleaved
from bench.graph.peers import DGL, CppSampler, compiler, dgl, pyg_loader, pyg_samples
from thrifty.graph import Graph, NeighborLoader, NeighborSampler


Contenders = dict[str, Callable[[], float]]


def sampling(
    graph: Graph, seeds: np.ndarray, *, fanouts: list[int], batch_size: int, rounds: int
) -> list[dict[str, Any]]:
    """Return milliseconds a batch, with one thread each."""
    parts = [seeds[i : i + batch_size] for i in range(0, len(seeds) - batch_size + 1, batch_size)]
    edges: dict[str, int] = {}

    def contender(name: str, sample: Callable[[np.ndarray, int], int]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            edges[name] = sum(sample(part, i) for i, part in enumerate(parts))
            return (time.perf_counter() - began) / len(parts) * 1e3

        return run

    def ours(**options: Any) -> Callable[[np.ndarray, int], int]:
        sampler = NeighborSampler(graph, fanouts, **options)
        return lambda part, i: sampler.sample(part, batch=i).num_edges

    contenders: Contenders = {}
    kinds: dict[str, dict[str, Any]] = {
        "ours, frontier": {},
        "ours, frontier, hash table": {"relabel": "hash"},
        "ours, full": {"mode": "full"},
        "ours, frontier, replace": {"replace": True},
    }
    for name, options in kinds.items():
        contenders[name] = contender(name, ours(**options))
    if compiler() is not None:
        twin = CppSampler(graph, fanouts, most_seeds=batch_size)
        contenders["C++ twin, frontier"] = contender(
            "C++ twin, frontier", lambda part, i: len(twin.sample(part, batch=i)[2])
        )
    if dgl() is not None:
        peer = DGL(graph, fanouts)
        peer.threads(1)
        contenders["DGL, full"] = contender("DGL, full", lambda part, _: peer.sample(part))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = interleaved(contenders, rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    return [
        {
            "sampler, 1 thread": name,
            "ms a batch": ms,
            "edges a batch": edges[name] // len(parts),
            "million edges/s": edges[name] / len(parts) / ms / 1e3,
        }
        for name, ms in found.items()
    ]


def preparation(
    graph: Graph, seeds: np.ndarray, *, fanouts: list[int], batch_size: int, rounds: int
) -> list[dict[str, Any]]:
    """Return milliseconds a batch with features and labels.

    Each contender has two threads, and no training runs.
    """
    contenders: Contenders = {}

    def contender(batches: Callable[[], Iterator[Any]]) -> Callable[[], float]:
        def run() -> float:
            began, num = time.perf_counter(), 0
            for _ in batches():
                num += 1
            return (time.perf_counter() - began) / num * 1e3

        return run

    for mode in ("frontier", "full"):
        for threads in (2, 1):
            loader = NeighborLoader(
                graph, fanouts, seeds=seeds, batch_size=batch_size, num_threads=threads, mode=mode
            )
            contenders[f"ours, {mode}, {threads} thread{'s' * (threads > 1)}"] = contender(
                loader.__iter__
            )
    if dgl() is not None:
        peer = DGL(graph, fanouts)
        peer.threads(2)
        contenders["DGL DataLoader, full, 2 threads"] = contender(
            lambda: peer.batches(seeds, batch_size=batch_size)
        )
    if pyg_samples() is None:
        theirs = pyg_loader(graph, fanouts, seeds, batch_size=batch_size)
        contenders["PyG NeighborLoader, frontier"] = contender(theirs.__iter__)
    found = interleaved(contenders, rounds=rounds)
    return [{"loader": name, "ms a batch": ms} for name, ms in found.items()]


@numba.njit(nogil=True)
def _chase(links: np.ndarray, num: int) -> int:
    at = 0
    for _ in range(num):
        at = links[at]
    return at


@numba.njit(nogil=True)
def _sum_of(values: np.ndarray, where: np.ndarray) -> int:
    total = 0
    for i in range(len(where)):
        total += values[where[i]]
    return total


def memory_bounds(graph: Graph, *, num: int = 2_000_000) -> dict[str, float]:
    """Return nanoseconds of random reads of the edges: dependent reads, and independent ones.

    A sampled edge takes at least two reads: the neighbour, and its entry in the table of numbers.
    """
    rng = np.random.default_rng(0)
    size = graph.num_edges
    links = np.empty(size, dtype=np.int32)
    order = rng.permutation(size).astype(np.int32)
    links[order] = np.roll(order, -1)
    where = rng.integers(size, size=num)
    found = {}
    for name, run in {
        "dependent read, ns": lambda n: _chase(links, n),
        "independent read, ns": lambda n: _sum_of(links, where[:n]),
    }.items():
        run(10)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run(num)
            times.append((time.perf_counter() - began) / num * 1e9)
        found[name] = median(times)
    return found
