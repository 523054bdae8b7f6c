"""Graphs from edge lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from thrifty.core import GraphError

from ._check import at_least
from ._graph import MAX_NODES, Graph, as_array
from .kernels._csr import group


def from_edge_index(
    edge_index: Any, *, num_nodes: int | None = None, x: Any = None, y: Any = None
) -> Graph:
    """Return a graph from an edge list in PyG's layout.

    Duplicate edges and edges from a node to itself are kept. The neighbours of each node stay in
    the order in which its edges are listed.

    Args:
        edge_index: a tensor, array or lists of integers, shape ``(2, num_edges)``: edge ``e``
            leads from node ``edge_index[0, e]`` to node ``edge_index[1, e]``.
        num_nodes: number of nodes. None takes the number of rows of ``x``, or else of ``y``, or
            else one more than the highest node that has an edge.
        x: features, see `Graph`.
        y: labels, see `Graph`.

    Raises:
        GraphError: the shape or dtype is wrong, or an edge leads from or to a node that does not
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
    at_least(0, num_nodes=num_nodes)
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
