"""Graphs from SciPy sparse matrices."""

from __future__ import annotations

from typing import Any

from thrifty.core import GraphError

from ._graph import Graph


def from_scipy(matrix: Any, *, x: Any = None, y: Any = None) -> Graph:
    """Return a graph from a sparse adjacency matrix.

    An edge leads from node ``i`` to node ``j`` where ``matrix[i, j] != 0``. Entries that are
    stored twice are added up first; stored zeros are no edges. Weights are ignored. Neighbours are
    in ascending order.

    Args:
        matrix: SciPy sparse matrix or array of any format, shape ``(num_nodes, num_nodes)``; it
            is not changed.
        x: features, see `Graph`.
        y: labels, see `Graph`.

    Raises:
        GraphError: the matrix is not sparse or not square.

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
