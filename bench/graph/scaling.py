"""Cost by size of the graph, and accuracy of sampled inference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F

from bench.graph.datasets import connected, real, rmat, split
from bench.graph.training import DROPOUT, LR, sage
from thrifty.graph import Graph, NeighborLoader, NeighborSampler, infer_layerwise, infer_sampled


BYTES_AN_EDGE = 24
"""Peak memory per edge while the largest graph is built.

It covers an edge list, its sorted copy and what sorting needs.
"""


def scaling(sizes: Sequence[int], *, fanouts: list[int], batches: int) -> list[dict[str, Any]]:
    """Return the time of a batch and of an epoch over all connected nodes, by number of edges.

    Graphs have 16 edges a node, as in Graph500.
    """
    rows = []
    for num_edges in sizes:
        if BYTES_AN_EDGE * num_edges > psutil.virtual_memory().available:
            rows.append({"edges": num_edges, "left out": "not enough memory"})
            continue
        scale = max((num_edges // 16).bit_length(), 10)
        began = time.perf_counter()
        graph = rmat(scale, num_edges)
        made = time.perf_counter() - began
        seeds = np.random.default_rng(0).permutation(connected(graph))
        rows.append({
            "edges": num_edges,
            "nodes": graph.num_nodes,
            "graph MB": (graph.indptr.nbytes + graph.indices.nbytes) / 2**20,
            "table MB a thread": 4 * graph.num_nodes / 2**20,
            "made in s": made,
            **_batch_times(graph, seeds, fanouts=fanouts, batches=batches),
        })
    return rows


def _batch_times(
    graph: Graph, seeds: np.ndarray, *, fanouts: list[int], batches: int
) -> dict[str, float]:
    sampler = NeighborSampler(graph, fanouts)
    size = min(1024, len(seeds))
    times, edges = [], []
    for i in range(batches + 2):
        at = (i * size) % (len(seeds) - size + 1)
        began = time.perf_counter()
        batch = sampler.sample(seeds[at : at + size], batch=i)
        times.append(time.perf_counter() - began)
        edges.append(batch.num_edges)
    ms = median(times[2:]) * 1e3
    return {
        "ms a batch": ms,
        "edges a batch": median(edges[2:]),
        "million edges/s": median(edges[2:]) / ms / 1e3,
        "sampling an epoch of all nodes, s": ms / 1e3 * len(seeds) / size,
    }


def inference(
    name: str, *, num_components: int, seeds: int, epochs: int, hidden: int
) -> dict[str, Any]:
    """Return the test accuracy with sampled and with full neighbourhoods, in percent."""
    graph = real(name, num_components=num_components)
    assert graph.y is not None
    found: dict[str, list[float]] = {"sampled": [], "full": []}
    for seed in range(seeds):
        train, _, test = split(graph.num_nodes, seed=seed)
        torch.manual_seed(seed)
        model = sage([graph.num_features, hidden, hidden, int(graph.y.max()) + 1], dropout=DROPOUT)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        loader = NeighborLoader(
            graph, [15, 10, 5], seeds=train, batch_size=1024, num_threads=1, seed=seed
        )
        for _ in range(epochs):
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), batch.y).backward()
                optimizer.step()
        y = graph.y[torch.from_numpy(test)]
        scores = {
            "sampled": infer_sampled(model, graph, test, fanouts=(20, 20, 20), seed=seed),
            "full": infer_layerwise(model, graph, nodes=test),
        }
        for way, values in scores.items():
            found[way].append(100 * float((values.argmax(1) == y).float().mean()))
    differences = [abs(a - b) for a, b in zip(found["sampled"], found["full"], strict=True)]
    return {
        "graph": name,
        "features": graph.num_features,
        "sampled (20, 20, 20), %": mean(found["sampled"]),
        "full neighbourhood, %": mean(found["full"]),
        "sd over seeds": stdev(found["full"]) if seeds > 1 else 0.0,
        "difference of means": abs(mean(found["sampled"]) - mean(found["full"])),
        "largest difference": max(differences),
    }
