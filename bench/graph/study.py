"""Sixteen GNN trials: one after the other, and as a study whose packs share every batch.

    python -m bench.graph.study '{"how": "packed", ...}'

Both use the same loader.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from bench.common.processes import say_result
from bench.graph.datasets import real, split
from thrifty.graph import GNN, SAGE, Batch, GraphData, NeighborLoader, tune_allocator


LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
DROPOUTS = (0.0, 0.25, 0.5, 0.75)


class Products(th.Task):
    """Categories of Amazon's computers."""

    optimizer = th.Adam(lr="lr")

    def __init__(
        self, *, graph: str, fanouts: list[int], hidden: int, batch_size: int, num_valid: int
    ) -> None:
        self.graph, self.fanouts, self.hidden = graph, fanouts, hidden
        self.batch_size = batch_size
        self.eval_batch_size = num_valid
        self.num_valid = num_valid

    def data(self, hp: th.HyperParameters) -> GraphData:
        graph = real(self.graph)
        train, valid, _ = split(graph.num_nodes, seed=0)
        return GraphData(graph, train=train, valid=valid[: self.num_valid], fanouts=self.fanouts)

    def model(self, hp: th.HyperParameters) -> nn.Module:
        graph = real(self.graph)
        assert graph.y is not None
        inner = [self.hidden] * (len(self.fanouts) - 1)
        sizes = [graph.num_features, *inner, int(graph.y.max()) + 1]
        layers = [SAGE(a, b) for a, b in pairwise(sizes)]
        return GNN(layers, dropout=hp.dropout)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch), batch.y)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        return {"accuracy": (model(batch).argmax(1) == batch.y).float().mean()}


def alone(task: Products, *, epochs: int) -> dict[str, Any]:
    """Train in plain PyTorch, one trial after the other."""
    data = task.data(th.HyperParameters({}))
    began = time.perf_counter()
    accuracies = []
    for lr, dropout in product(LEARNING_RATES, DROPOUTS):
        torch.manual_seed(0)
        model = task.model(th.HyperParameters({"dropout": dropout}))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        options = {"num_threads": 1, "seed": 0}
        loader = NeighborLoader(
            data.graph, data.fanouts, seeds=data.train, batch_size=task.batch_size, **options
        )
        valid = NeighborLoader(
            data.graph,
            data.valid_fanouts,
            seeds=data.valid,
            batch_size=task.eval_batch_size,
            shuffle=False,
            **options,
        )
        accuracy = 0.0
        for _ in range(epochs):
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                right = sum(
                    task.metrics(model, batch)["accuracy"] * batch.num_seeds
                    for batch in valid.epoch(0)
                )
            accuracy = float(right) / len(data.valid)
        accuracies.append(accuracy)
    return {"seconds": time.perf_counter() - began, "best": max(accuracies)}


def studied(
    task: Products, *, epochs: int, pack: str, workers: int, pack_size: int | None
) -> dict[str, Any]:
    """Train as a study, its database included."""
    space = th.Space(lr=th.Choice(list(LEARNING_RATES)), dropout=th.Choice(list(DROPOUTS)))
    with tempfile.TemporaryDirectory() as folder:
        study = th.Study(
            task,
            space,
            algorithm=th.GridSearch(max_epochs=epochs),
            metric="accuracy",
            storage=f"sqlite:///{folder}/study.db",
            name="graph",
        )
        began = time.perf_counter()
        executor = th.Local(workers=workers, pack=pack, pack_size=pack_size)
        study.run(executor=executor, progress=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "best": study.best_trial.value}


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads", 2))
    if options.pop("tuned", False):
        tune_allocator()
    how, epochs = options.pop("how"), options.pop("epochs")
    runs = {key: options.pop(key) for key in ("pack", "workers", "pack_size") if key in options}
    task = Products(**options)
    real(task.graph)
    say_result(
        alone(task, epochs=epochs) if how == "alone" else studied(task, epochs=epochs, **runs)
    )


if __name__ == "__main__":
    main()
