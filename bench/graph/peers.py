"""Peers on our graphs: DGL and PyG, if installed, and a C++ twin of our sampler.

The twin is compiled by the ``c++`` or ``g++`` on the path.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from thrifty.core import derive_seed
from thrifty.graph import Graph


SOURCE = Path(__file__).with_name("sampler.cpp")
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
        library = dgl()
        assert library is not None
        self.library = library
        self.graph = self.library.graph(
            ("csc", (torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices).long(), [])),
            num_nodes=graph.num_nodes,
        )
        assert graph.x is not None
        assert graph.y is not None
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
        return _DGLSage([conv(a, b, "mean") for a, b in itertools.pairwise(sizes)], dropout=dropout)


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


def pyg_loader(graph: Graph, fanouts: Sequence[int], seeds: np.ndarray, *, batch_size: int) -> Any:
    """Return PyG's NeighborLoader over the same graph."""
    data = importlib.import_module("torch_geometric.data").Data(
        x=graph.x, y=graph.y, edge_index=_edge_index(graph), num_nodes=graph.num_nodes
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


# -- the C++ twin ------------------------------------------------------------------------


def compiler() -> str | None:
    """Return the compiler's path, or None."""
    return shutil.which("c++") or shutil.which("g++")


class CppSampler:
    """C++ sampler that samples as ``NeighborSampler(graph, fanouts)`` does, node for node.

    All ``fanouts`` are positive.
    """

    def __init__(self, graph: Graph, fanouts: list[int], *, most_seeds: int) -> None:
        library = Path(mkdtemp()) / "sampler.so"
        command = [compiler() or "c++", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
        self._function = ctypes.CDLL(str(library)).sample
        self._function.restype = None
        self._indptr = np.ascontiguousarray(graph.indptr)
        self._indices = np.ascontiguousarray(graph.indices)
        self._fanouts = np.array(fanouts, dtype=np.int64)
        rows, edges = most_seeds, 0
        total = most_seeds
        for fanout in fanouts:
            rows *= fanout
            edges, total = edges + rows, total + rows
        most_nodes = min(total, graph.num_nodes) + 1
        self._bits = max(graph.num_nodes - 1, 1).bit_length()
        self._table = np.zeros(graph.num_nodes, dtype=np.uint32)
        self._stamp = 0
        self._nodes = np.empty(most_nodes, dtype=np.int64)
        self._picks = np.empty(rows, dtype=np.int64)
        self._found = np.empty(rows, dtype=np.int32)
        self._starts = np.empty(most_nodes + 1, dtype=np.int32)
        self._edges = np.empty(edges, dtype=np.int32)
        self._counts = np.empty(3, dtype=np.int64)

    def sample(
        self, seeds: np.ndarray, *, epoch: int = 0, batch: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return nodes, row pointers and edges, in arrays that the caller may keep as ours."""
        self._stamp += 1
        if self._stamp >> (32 - self._bits):
            self._table.fill(0)
            self._stamp = 1
        keys = np.array(
            [derive_seed(0, "neighbors", epoch, batch, h) for h in range(len(self._fanouts))],
            dtype=np.uint64,
        )
        self._nodes[: len(seeds)] = seeds
        self._function(
            *map(_address, (self._indptr, self._indices, self._fanouts)),
            ctypes.c_int64(len(self._fanouts)),
            *map(_address, (keys, self._table)),
            ctypes.c_uint32(self._stamp),
            ctypes.c_uint32(self._bits),
            _address(self._nodes),
            ctypes.c_int64(len(seeds)),
            *map(_address, (self._picks, self._found, self._starts, self._edges, self._counts)),
        )
        num_nodes, num_edges, num_rows = self._counts.tolist()
        return (
            self._nodes[:num_nodes].copy(),
            self._starts[: num_rows + 1].copy(),
            self._edges[:num_edges].copy(),
        )


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
