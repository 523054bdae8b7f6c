"""Graphs from PyG."""

from __future__ import annotations

from typing import Any

import torch

from thrifty.core import GraphError

from ._edge_index import from_edge_index
from ._graph import Graph


def from_pyg(data: Any) -> Graph:
    """Return ``torch_geometric.data.Data`` as a graph, with its ``x`` and ``y``.

    Edges come from ``edge_index``, or else from ``adj_t`` (the transposed adjacency matrix, a
    sparse tensor of torch or of torch-sparse). Weights, edge features and masks are ignored; for
    seeds, use ``data.train_mask.nonzero().flatten()``.

    Raises:
        GraphError: the data has no edges, is heterogeneous, or its edges are not well formed.

    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):  # torch warns of what PyG uses
    ...     from torch_geometric.data import Data
    >>> from_pyg(Data(x=torch.zeros(3, 8), edge_index=torch.tensor([[0, 1], [1, 2]])))
    Graph(num_nodes=3, num_edges=2, num_features=8)
    """
    if hasattr(data, "node_types"):
        raise GraphError(
            "the data are heterogeneous; give one type of nodes: data.to_homogeneous()"
        )
    x, y = getattr(data, "x", None), getattr(data, "y", None)
    edge_index = getattr(data, "edge_index", None)
    if edge_index is not None:
        return from_edge_index(edge_index, num_nodes=_num_nodes(data), x=x, y=y)
    adj_t = getattr(data, "adj_t", None)
    if adj_t is None:
        raise GraphError(
            f"a {type(data).__name__} without edge_index and adj_t; give Data(edge_index=..., "
            "x=..., y=...)"
        )
    indptr, indices, shape = _rows_of(adj_t)
    if shape[0] != shape[1]:
        raise GraphError(f"adj_t has shape {shape}; give a row and a column for each node")
    return Graph(indptr, indices, x=x, y=y)


def _num_nodes(data: Any) -> int | None:
    """Return the stated number of nodes, or what PyG infers from attributes that we do not read.

    PyG warns where it can only guess. None means that ``x`` or ``y`` tells the number.
    """
    if "num_nodes" not in data and (data.x is not None or data.y is not None):
        return None
    num_nodes: int | None = data.num_nodes
    return num_nodes


def _rows_of(adj_t: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    if hasattr(adj_t, "sparse_sizes"):
        indptr, indices, _ = adj_t.csr()
        return indptr, indices, tuple(adj_t.sparse_sizes())
    if not isinstance(adj_t, torch.Tensor) or adj_t.layout == torch.strided or adj_t.dim() != 2:
        raise GraphError(
            f"adj_t is a {type(adj_t).__name__}; give a sparse matrix, such as "
            "adj_t.to_sparse_csr()"
        )
    if adj_t.layout != torch.sparse_csr:
        adj_t = adj_t.to_sparse_csr()
    return adj_t.crow_indices(), adj_t.col_indices(), tuple(adj_t.shape)
