"""Predictions for many nodes, from sampled neighbourhoods or layer by layer from all neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core import GraphError, check_integers

from ._batch import Batch, Block
from ._gnn import make_batch
from ._graph import Graph, checked_nodes
from ._loader import NeighborLoader
from ._sampler import NeighborSampler


Progress = Callable[[int, int], None]
"""Callback that receives the number of nodes done and their total.

Each distinct node counts once, and in layer-wise inference once for each layer.
"""


class Layered(Protocol):
    """A model that can be applied layer by layer, such as ``GNN``."""

    num_layers: int

    def layer(self, number: int, x: Tensor, block: Block, /) -> Tensor:
        """Apply layer ``number`` and what follows it.

        The input has shape ``(block.num_src, features)``, the output
        ``(block.num_dst, features)``.
        """


def infer_sampled(
    model: nn.Module,
    graph: Graph,
    nodes: Any,
    *,
    fanouts: Sequence[int] = (20, 20, 20),
    batch_size: int = 4096,
    seed: int = 0,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> Tensor:
    """Predict from sampled neighbourhoods.

    With fanout 20 in each of three layers, predictions are about as good as those from all
    neighbours: SALIENT (Kaler et al., MLSys 2022, section 5). The model is in evaluation mode
    during the call.

    Args:
        model: Module that takes a ``Batch`` and returns a row for each seed.
        graph: Graph with features.
        nodes: Node numbers to predict for, shape ``(num,)``; duplicates are allowed.
        fanouts: Neighbours of each node at each hop, the seeds' hop first.
        batch_size: Number of nodes to predict at once.
        seed: Seed of the sampling.
        num_threads: Number of threads that sample ahead of the model; the result does not depend
            on it.
        progress: Callback that receives the progress.

    Returns:
        Shape ``(num, out_features)``, on the CPU.

    Raises:
        GraphError: Nodes, fanouts or options are invalid, or the graph has no features.

    >>> from thrifty.graph import GNN, SAGE
    >>> ring = Graph(np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32), x=torch.ones(5, 8))
    >>> infer_sampled(GNN([SAGE(8, 3)]), ring, [0, 3], fanouts=[1]).shape
    torch.Size([2, 3])
    """
    x = _features(graph)
    wanted = checked_nodes(nodes, num_nodes=graph.num_nodes, name="node")
    check_integers(GraphError, 1, batch_size=batch_size)
    distinct, places = np.unique(wanted, return_inverse=True)
    where = _place(model)
    dtype = None if where.dtype == x.dtype else torch.float32
    batches: Iterable[Batch]
    if len(distinct):
        batches = NeighborLoader(
            graph,
            fanouts,
            seeds=distinct,
            batch_size=batch_size,
            shuffle=False,
            num_threads=num_threads,
            # Forking would take longer than most calls.
            processes=False,
            seed=seed,
            dtype=dtype,
            device=where.device,
        )
    else:
        # A batch without seeds tells how wide the result is.
        batches = [make_batch(NeighborSampler(graph, fanouts), distinct, dtype=dtype)]
    rows: list[Tensor] = []
    done = 0
    with _evaluating(model):
        for batch in batches:
            assert batch.x is not None
            rows.append(_checked_rows(model(_at(batch, where)), batch).cpu())
            done += batch.num_seeds
            if progress is not None:
                progress(done, len(distinct))
    return torch.cat(rows)[torch.from_numpy(places)]


def infer_layerwise(
    model: Layered,
    graph: Graph,
    *,
    nodes: Any = None,
    batch_size: int = 4096,
    progress: Progress | None = None,
) -> Tensor:
    """Predict from all neighbours, one layer at a time.

    Each layer runs for all nodes before the next one, so no node is computed twice. The result
    equals that of sampling with fanout -1 at each hop. Layers compute only the nodes that
    ``nodes`` depend on. The model is in evaluation mode during the call.

    Args:
        model: Model with ``num_layers`` and ``layer(number, x, block)``, such as ``GNN``.
        graph: Graph with features.
        nodes: Node numbers to predict for, shape ``(num,)``; duplicates are allowed; None for
            all nodes.
        batch_size: Number of nodes to compute at once.
        progress: Callback that receives the progress over the nodes of all layers.

    Returns:
        Shape ``(num, out_features)``, on the CPU.

    Raises:
        GraphError: Nodes or options are invalid, the graph has no features, or the model cannot
            be applied layer by layer.

    >>> from thrifty.graph import GNN, SAGE
    >>> ring = Graph(np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32), x=torch.ones(5, 8))
    >>> infer_layerwise(GNN([SAGE(8, 16), SAGE(16, 3)]), ring).shape
    torch.Size([5, 3])
    """
    x = _features(graph)
    if not (hasattr(model, "num_layers") and callable(getattr(model, "layer", None))):
        raise GraphError(
            f"{type(model).__name__} has no num_layers and layer(number, x, block); put its "
            "layers into a GNN"
        )
    check_integers(GraphError, 1, batch_size=batch_size)
    neighbors = NeighborSampler(graph, [-1])
    everyone = np.arange(graph.num_nodes)
    wanted = (
        everyone if nodes is None else checked_nodes(nodes, num_nodes=graph.num_nodes, name="node")
    )
    stages = _needed(neighbors, wanted, num_layers=model.num_layers, batch_size=batch_size)
    total, done = sum(map(len, stages)), 0
    where = _place(model)
    with _evaluating(model):
        for number, stage in enumerate(stages):
            # Rows of nodes that are not needed are never touched.
            after: Tensor | None = None
            for part in _parts(stage, batch_size):
                batch = neighbors.sample(part)
                batch = _at(replace(batch, x=x[batch.nodes]), where)
                assert batch.x is not None
                rows = model.layer(number, batch.x, batch.blocks[0]).cpu()
                if after is None:
                    after = rows.new_empty(graph.num_nodes, *rows.shape[1:])
                after[torch.from_numpy(part)] = rows
                done += len(part)
                if progress is not None:
                    progress(done, total)
            assert after is not None
            x = after
    return x if nodes is None else x[torch.from_numpy(wanted)]


def _needed(
    neighbors: NeighborSampler, wanted: np.ndarray, *, num_layers: int, batch_size: int
) -> list[np.ndarray]:
    """Return the sorted nodes whose outputs each layer must compute, the input layer first."""
    stages = [np.unique(wanted)]
    num_nodes = neighbors.graph.num_nodes
    while len(stages) < num_layers:
        last = stages[0]
        if len(last) < num_nodes:
            found = np.zeros(num_nodes, dtype=bool)
            for part in _parts(last, batch_size):
                found[neighbors.sample(part).nodes.numpy()] = True
            last = np.flatnonzero(found)
        stages.insert(0, last)
    return stages


def _features(graph: Graph) -> Tensor:
    if graph.x is None:
        raise GraphError("the graph has no features; give it some: graph.replace(x=...)")
    return graph.x


def _parts(nodes: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield parts of the nodes, and one empty part without nodes.

    The result of an empty part has no rows and the right width.
    """
    for start in range(0, max(len(nodes), 1), size):
        yield nodes[start : start + size]


class _Place:
    """Device and dtype of a model's floating-point tensors."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype


def _place(model: Any) -> _Place:
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    for tensor in tensors:
        if tensor.is_floating_point():
            return _Place(tensor.device, tensor.dtype)
    return _Place(torch.device("cpu"), torch.float32)


def _at(batch: Batch, where: _Place) -> Batch:
    assert batch.x is not None
    moved = batch.to(where.device)
    assert moved.x is not None
    return replace(moved, x=moved.x.to(where.dtype))


def _checked_rows(predicted: Tensor, batch: Batch) -> Tensor:
    if predicted.shape[0] != batch.num_seeds:
        raise GraphError(
            f"the model gives {predicted.shape[0]} rows for {batch.num_seeds} seeds; return "
            "those of the first seeds alone"
        )
    return predicted


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put all modules in evaluation mode without gradients, then restore each module's mode."""
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
