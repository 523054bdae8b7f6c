"""End-to-end training of a three-layer SAGE: sampling, features, a step, and a check of its losses.

    python -m bench.graph.training '{"graph": "rmat", "hidden": 256, ...}'

It runs in a process of its own, because memory allocation is configured once for a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.common.harness import interleaved
from bench.common.processes import say_result
from bench.graph.datasets import connected, real, rmat
from bench.graph.peers import DGL, dgl, pyg_loader, pyg_sage, pyg_samples
from bench.graph.sampling import Contenders
from thrifty.graph import GNN, SAGE, Batch, Graph, NeighborLoader, tune_allocator


DROPOUT = 0.5
LR = 3e-3


def sage(sizes: Sequence[int], *, dropout: float = DROPOUT) -> GNN:
    """Return a stack of our SAGE layers."""
    return GNN([SAGE(a, b) for a, b in pairwise(sizes)], dropout=dropout)


def step_times(
    graph: Graph,
    seeds: np.ndarray,
    *,
    fanouts: list[int],
    batch_size: int,
    hidden: int,
    dropout: float,
    batches: int,
    rounds: int,
) -> dict[str, float]:
    """Return milliseconds of a training step with everything that belongs to it."""
    assert graph.y is not None
    sizes = [graph.num_features, *[hidden] * (len(fanouts) - 1), int(graph.y.max()) + 1]
    contenders: Contenders = {}

    def contender(
        model: nn.Module, epoch: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    ) -> Callable[[], float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        model.train()

        def run() -> float:
            began, num = time.perf_counter(), 0
            for scores, y in islice(epoch(), batches):
                optimizer.zero_grad()
                F.cross_entropy(scores, y).backward()
                optimizer.step()
                num += 1
            return (time.perf_counter() - began) / num * 1e3

        return run

    for mode in ("frontier", "full"):
        loader = NeighborLoader(
            graph, fanouts, seeds=seeds, batch_size=batch_size, num_threads=1, mode=mode
        )
        model = sage(sizes, dropout=dropout)
        contenders[f"ours, {mode}"] = contender(model, partial(_ours, model, loader))
    if dgl() is not None:
        peer = DGL(graph, fanouts)
        peer.threads(torch.get_num_threads())
        theirs = peer.sage(sizes, dropout=dropout)
        contenders["DGL, full"] = contender(
            theirs,
            lambda: (
                (theirs(blocks, x), y)
                for blocks, x, y in peer.batches(seeds, batch_size=batch_size)
            ),
        )
    if pyg_samples() is None:
        net = pyg_sage(sizes, dropout=dropout)
        neighbors = pyg_loader(graph, fanouts, seeds, batch_size=batch_size)
        contenders["PyG, frontier"] = contender(net, lambda: _pyg(net, neighbors))
    return interleaved(contenders, rounds=rounds)


def _ours(model: GNN, loader: NeighborLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for batch in loader:
        assert batch.y is not None
        yield model(batch), batch.y


def _pyg(model: nn.Module, loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for data in loader:
        scores = model(
            data.x,
            data.edge_index,
            num_sampled_nodes_per_hop=data.num_sampled_nodes,
            num_sampled_edges_per_hop=data.num_sampled_edges,
        )
        yield scores[: data.batch_size], data.y[: data.batch_size]


def loss_difference(graph: Graph, *, steps: int, hidden: int) -> float:
    """Return the largest loss difference between SAGE and a dense-matrix twin.

    Both are trained side by side.
    """
    assert graph.y is not None
    sizes = [graph.num_features, hidden, hidden, int(graph.y.max()) + 1]
    torch.manual_seed(0)
    fast, slow = sage(sizes, dropout=0.0), sage(sizes, dropout=0.0)
    slow.load_state_dict(fast.state_dict())
    loader = NeighborLoader(graph, [4, 3, 2], batch_size=64, num_threads=0)
    worst = 0.0
    optimizers = [torch.optim.Adam(model.parameters(), lr=LR) for model in (fast, slow)]
    batches = (batch for epoch in range(steps) for batch in loader.epoch(epoch))
    for batch in islice(batches, steps):
        losses = []
        for optimizer, scores in zip(optimizers, (fast(batch), _dense(slow, batch)), strict=True):
            loss = F.cross_entropy(scores, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        worst = max(worst, abs(losses[0] - losses[1]))
    return worst


def _dense(model: GNN, batch: Batch) -> torch.Tensor:
    x = batch.x
    assert x is not None
    for number, (layer, block) in enumerate(zip(model.layers, batch.blocks, strict=True)):
        mean = torch.zeros(block.num_dst, block.num_src)
        mean.index_put_(
            (block.destinations(), block.indices.long()),
            torch.ones(block.num_edges),
            accumulate=True,
        )
        mean /= mean.sum(1, keepdim=True).clamp(min=1)
        joined = torch.cat([mean @ x, x[: block.num_dst]], dim=1)
        x = F.linear(joined, layer.weight, layer.bias)
        if number + 1 < len(model.layers):
            x = torch.relu(x)
    return x


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.pop("tuned"):
        tune_allocator()
    torch.set_num_threads(options.pop("threads"))
    name, size = options.pop("graph"), options.pop("size", None)
    if name == "rmat":
        graph = rmat(*size, num_features=100)
        seeds = np.random.default_rng(1).permutation(connected(graph))
        # An epoch is as long as what is measured.
        seeds = seeds[: options["batch_size"] * options["batches"]]
    else:
        graph = real(name, num_components=128 if name == "coauthor_cs" else 0)
        seeds = np.random.default_rng(1).permutation(graph.num_nodes)
    say_result(step_times(graph, seeds, **options))


if __name__ == "__main__":
    main()
