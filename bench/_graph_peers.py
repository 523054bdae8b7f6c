"""DGL and PyG, if installed: their samplers, loaders and layers on our graphs."""

from __future__ import annotations

import importlib
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from thrifty.graph import Graph


DGL_INSTALL = "pip install --no-deps dgl==1.1.3"


def dgl() -> Any | None:
    """Return DGL, or None."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("dgl")
        except (ImportError, OSError):
            return None


def pyg_samples() -> str | None:
    """Return why PyG's NeighborLoader cannot run, or None if it can."""
    try:
        typing = importlib.import_module("torch_geometric.typing")
    except ImportError:
        return "torch-geometric is not installed"
    if typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE:
        return None
    return "PyG's NeighborLoader needs pyg-lib or torch-sparse, which are not on PyPI as wheels"


class DGL:
    """All that is measured of DGL. ``fanouts`` begin with those of the seeds, as ours do."""

    def __init__(self, graph: Graph, fanouts: Sequence[int]) -> None:
        self.library = dgl()
        self.graph = self.library.graph(
            (
                "csc",
                (torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices).long(), []),
            ),
            num_nodes=graph.num_nodes,
        )
        self.x, self.y = graph.x, graph.y
        # DGL orders fanouts by layer, starting with the input's.
        loading = importlib.import_module("dgl.dataloading")
        self.sampler = loading.MultiLayerNeighborSampler(list(reversed(fanouts)))
        self._loader = loading.DataLoader

    def threads(self, num: int) -> None:
        """Set how many threads DGL's own loops use."""
        importlib.import_module("dgl.utils").set_num_threads(num)

    def sample(self, seeds: np.ndarray) -> int:
        """Sample once; return the number of edges."""
        _, _, blocks = self.sampler.sample_blocks(self.graph, torch.from_numpy(seeds))
        return sum(block.num_edges() for block in blocks)

    def batches(self, seeds: np.ndarray, *, batch_size: int) -> Iterator[tuple[Any, ...]]:
        """Yield blocks, features and labels by its DataLoader in this process.

        The DataLoader samples with all its threads.
        """
        loader = self._loader(
            self.graph,
            torch.from_numpy(seeds),
            self.sampler,
            batch_size=batch_size,
            shuffle=True,
            num_workers=0,
        )
        with warnings.catch_warnings():
            # DGL warns that workers could be bound to cores, but there are no workers.
            warnings.simplefilter("ignore")
            iterator = iter(loader)
        for inputs, outputs, blocks in iterator:
            yield blocks, self.x[inputs], self.y[outputs]

    def sage(self, sizes: Sequence[int], *, dropout: float) -> nn.Module:
        """Return a stack of DGL's SAGEConv."""
        conv = importlib.import_module("dgl.nn.pytorch").SAGEConv
        return _DGLSage(
            [conv(a, b, "mean") for a, b in itertools.pairwise(sizes)],
            dropout=dropout,
        )


class _DGLSage(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], *, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = dropout

    def forward(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            if number + 1 < len(self.layers):
                x = F.dropout(torch.relu(x), self.dropout, self.training)
        return x


def pyg_loader(
    graph: Graph, fanouts: Sequence[int], seeds: np.ndarray, *, batch_size: int
) -> Any:
    """Return PyG's NeighborLoader over the same graph."""
    data = importlib.import_module("torch_geometric.data").Data(
        x=graph.x,
        y=graph.y,
        edge_index=_edge_index(graph),
        num_nodes=graph.num_nodes,
    )
    return importlib.import_module("torch_geometric.loader").NeighborLoader(
        data,
        list(fanouts),
        input_nodes=torch.from_numpy(seeds),
        batch_size=batch_size,
        shuffle=True,
        num_workers=0,
    )


def pyg_sage(sizes: Sequence[int], *, dropout: float) -> nn.Module:
    """Return PyG's GraphSAGE, which trims what a layer does not need."""
    return importlib.import_module("torch_geometric.nn").GraphSAGE(
        sizes[0], sizes[1], len(sizes) - 1, sizes[-1], dropout=dropout
    )


def _edge_index(graph: Graph) -> torch.Tensor:
    targets = np.repeat(np.arange(graph.num_nodes), graph.degrees())
    return torch.from_numpy(np.stack([graph.indices.astype(np.int64), targets]))
