"""Conversions between `Graph` and edge lists, SciPy, NetworkX and PyG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from thrifty.core import GraphError, check_integers, require

from ._graph import MAX_NODES, Graph, as_array
from .kernels._csr import group


def from_edge_index(
    edge_index: Any, *, num_nodes: int | None = None, x: Any = None, y: Any = None
) -> Graph:
    """Return a graph from an edge list in PyG's layout.

    Duplicate edges and edges from a node to itself are kept. The neighbours of each node stay in
    the order in which its edges are listed.

    Args:
        edge_index: A tensor, array or lists of integers, shape ``(2, num_edges)``: edge ``e``
            leads from node ``edge_index[0, e]`` to node ``edge_index[1, e]``.
        num_nodes: Number of nodes. None takes the number of rows of ``x``, or else of ``y``, or
            else one more than the highest node that has an edge.
        x: Features, see `Graph`.
        y: Labels, see `Graph`.

    Raises:
        GraphError: The shape or dtype is wrong, or an edge leads from or to a node that does not
            exist.

    >>> graph = from_edge_index([[0, 1, 0], [1, 2, 2]])
    >>> graph
    Graph(num_nodes=3, num_edges=3)
    >>> graph.neighbors(2)
    array([1, 0], dtype=int32)
    """
    array = _checked_edges(edge_index)
    num_nodes = _num_nodes(num_nodes, x, y)
    if num_nodes is None:
        num_nodes = int(array.max()) + 1 if array.size else 0
    _check_ends(array, num_nodes)
    sources, destinations = (_kernel_ready(row) for row in array)
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    indices = np.empty(len(sources), dtype=np.int32)
    group(destinations, sources, indptr, indices)
    return Graph(indptr, indices, x=x, y=y, check=False)


def _checked_edges(edge_index: Any) -> np.ndarray:
    array = as_array(edge_index, name="edge_index")
    is_pair = array.ndim == 2 and array.shape[0] == 2
    if not is_pair or (array.dtype.kind not in "iu" and array.size):
        hint = "; give edge_index.T" if array.ndim == 2 and array.shape[1] == 2 else ""
        raise GraphError(
            f"edge_index has shape {array.shape} and dtype {array.dtype}; give integers of "
            f"shape (2, num_edges){hint}"
        )
    return array


def _num_nodes(num_nodes: Any, x: Any, y: Any) -> int | None:
    for rows in (x, y):
        if num_nodes is None and rows is not None and np.ndim(rows):
            return len(rows)
    if num_nodes is None:
        return None
    check_integers(GraphError, 0, num_nodes=num_nodes)
    return int(num_nodes)


def _check_ends(edges: np.ndarray, num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise GraphError(f"{num_nodes} nodes: at most {MAX_NODES} can be numbered by int32")
    if edges.size and (edges.min() < 0 or edges.max() >= num_nodes):
        bad = np.flatnonzero(((edges < 0) | (edges >= num_nodes)).any(axis=0))[0]
        source, destination = edges[:, bad]
        nodes = f"nodes 0 to {num_nodes - 1}" if num_nodes else "no nodes"
        raise GraphError(
            f"edge {bad} leads from node {source} to node {destination}, but the graph has "
            f"{nodes}; "
            "number nodes from 0, or give num_nodes"
        )


def _kernel_ready(row: np.ndarray) -> np.ndarray:
    # Kernels are compiled for int32 and int64 only; other dtypes are rare and cost a copy.
    dtype = row.dtype if row.dtype in {np.dtype(np.int32), np.dtype(np.int64)} else np.int64
    return np.ascontiguousarray(row, dtype=dtype)


def from_scipy(matrix: Any, *, x: Any = None, y: Any = None) -> Graph:
    """Return a graph from a sparse adjacency matrix.

    An edge leads from node ``i`` to node ``j`` where ``matrix[i, j] != 0``. Entries that are
    stored twice are added up first; stored zeros are no edges. Weights are ignored. Neighbours are
    in ascending order.

    Args:
        matrix: SciPy sparse matrix or array of any format, shape ``(num_nodes, num_nodes)``; it
            is not changed.
        x: Features, see `Graph`.
        y: Labels, see `Graph`.

    Raises:
        GraphError: The matrix is not sparse or not square.

    >>> from scipy.sparse import csr_array
    >>> graph = from_scipy(csr_array([[0, 1, 0.5], [0, 0, 2], [0, 0, 0]]))
    >>> graph.neighbors(2)
    array([0, 1], dtype=int32)
    """
    if not hasattr(matrix, "tocsc"):
        raise GraphError(
            f"a {type(matrix).__name__} is no sparse matrix; give scipy.sparse.csr_array(matrix)"
        )
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise GraphError(
            f"the matrix has shape {tuple(matrix.shape)}; give (num_nodes, num_nodes), a row "
            "and a column for each node"
        )
    # Column j holds the nodes that send messages to j.
    columns = matrix.tocsc(copy=True)
    columns.sum_duplicates()
    columns.eliminate_zeros()
    return Graph(columns.indptr, columns.indices, x=x, y=y)


def from_networkx(graph: Any, *, x: str | None = None, y: str | None = None) -> Graph:
    """Return a NetworkX graph as a ``Graph``, with nodes in the order of ``graph.nodes``.

    An undirected edge becomes one in each direction, parallel edges stay, and weights are ignored.

    Args:
        graph: ``Graph``, ``DiGraph``, ``MultiGraph`` or ``MultiDiGraph``.
        x: Name of the node attribute that holds features, or None. Each node needs equally many
            numbers; a single number is one feature.
        y: Name of the node attribute that holds labels, or None.

    Raises:
        GraphError: The graph is not from NetworkX, or a node lacks an attribute.

    >>> import networkx
    >>> graph = networkx.DiGraph([("a", "b"), ("c", "b")])
    >>> networkx.set_node_attributes(graph, {"a": 0, "b": 1, "c": 1}, "label")
    >>> made = from_networkx(graph, y="label")
    >>> made.neighbors(1), made.y
    (array([0, 2], dtype=int32), tensor([0, 1, 1]))
    """
    if not hasattr(graph, "adjacency") or not hasattr(graph, "is_multigraph"):
        raise GraphError(f"a {type(graph).__name__} is no graph of NetworkX")
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    many = graph.is_multigraph()
    edges = [
        (numbers[source], numbers[destination])
        for source, found in graph.adjacency()
        for destination, data in found.items()
        for _ in range(len(data) if many else 1)
    ]
    edge_index = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return from_edge_index(
        edge_index,
        num_nodes=len(numbers),
        x=None if x is None else _features(graph, x),
        y=None if y is None else _attribute(graph, y),
    )


def _features(graph: Any, name: str) -> np.ndarray:
    values = _attribute(graph, name)
    if values.dtype.kind not in "biuf":
        raise GraphError(f"attribute {name!r} holds {values.dtype}; features are numbers")
    rows = values[:, np.newaxis] if values.ndim == 1 else values
    return rows.astype(np.float32)


def _attribute(graph: Any, name: str) -> np.ndarray:
    values = []
    for node, found in graph.nodes(data=True):
        if name not in found:
            raise GraphError(f"node {node!r} has no attribute {name!r}; give each node one")
        values.append(np.asarray(found[name]))
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise GraphError(
            f"attribute {name!r} has shapes {sorted(shapes)}; give each node equally many numbers"
        )
    return np.array(values)


def from_pyg(data: Any) -> Graph:
    """Return ``torch_geometric.data.Data`` as a graph, with its ``x`` and ``y``.

    Edges come from ``edge_index``, or else from ``adj_t`` (the transposed adjacency matrix, a
    sparse tensor of torch or of torch-sparse). Weights, edge features and masks are ignored; for
    seeds, use ``data.train_mask.nonzero().flatten()``.

    Raises:
        GraphError: The data has no edges, is heterogeneous, or its edges are not well formed.

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
        return from_edge_index(edge_index, num_nodes=_num_nodes_of_data(data), x=x, y=y)
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


def _num_nodes_of_data(data: Any) -> int | None:
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


def pyg_data(
    *,
    nodes: torch.Tensor,
    edge_index: torch.Tensor,
    hop_nodes: Sequence[int],
    hop_edges: Sequence[int],
    x: torch.Tensor | None,
    y: torch.Tensor | None,
) -> Any:
    """Return ``torch_geometric.data.Data`` with the fields of PyG's ``NeighborLoader``.

    Arguments are as in ``Batch``.

    Raises:
        MissingExtraError: PyG is not installed.
    """
    Data = require("torch_geometric.data", package="torch-geometric", extra="pyg").Data
    return Data(
        x=x,
        y=y,
        edge_index=edge_index,
        n_id=nodes,
        batch_size=hop_nodes[0],
        num_sampled_nodes=list(hop_nodes),
        num_sampled_edges=list(hop_edges),
        num_nodes=len(nodes),
    )
