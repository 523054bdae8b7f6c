"""A graph in compressed sparse row form, with features and labels of its nodes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from thrifty.core import GraphError


FEATURE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NODES = 2**31 - 1


class Graph:
    """A graph in CSR form by destination; treat it as immutable.

    Messages to node ``v`` come from ``indices[indptr[v]:indptr[v + 1]]``. You may pass arrays,
    tensors or lists. Contiguous ones that have the dtype named below are not copied, and
    memory-mapped ones stay on disk.

    Args:
        indptr: where each node's neighbours begin and end; int64, shape ``(num_nodes + 1,)``.
        indices: neighbours of all nodes; int32, shape ``(num_edges,)``.
        x: features, float32, bfloat16 or float16, shape ``(num_nodes, num_features)``.
        y: labels, shape ``(num_nodes, ...)``.
        check: whether to check ranges (one pass over the edges).

    Raises:
        GraphError: a shape, dtype or range is wrong; the message says where.

    >>> graph = Graph(np.array([0, 1, 3]), np.array([1, 0, 1], dtype=np.int32))
    >>> graph
    Graph(num_nodes=2, num_edges=3)
    >>> graph.neighbors(1)
    array([0, 1], dtype=int32)
    """

    __slots__ = ("indices", "indptr", "x", "y")

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        *,
        x: Any = None,
        y: Any = None,
        check: bool = True,
    ) -> None:
        self.indptr = _row_starts(indptr)
        self.indices = _node_numbers(indices, num_nodes=self.num_nodes)
        if check:
            _check_starts(self.indptr, num_edges=self.num_edges)
            _check_range(self.indices, num_nodes=self.num_nodes)
        self.x = _rows(x, name="x", num_nodes=self.num_nodes)
        if self.x is not None and self.x.dtype not in FEATURE_DTYPES:
            raise GraphError(
                f"features x are {self.x.dtype}; give float32, bfloat16 or float16, such as "
                "x.float()"
            )
        if self.x is not None and self.x.dim() != 2:
            raise GraphError(
                f"features x have shape {tuple(self.x.shape)}; give (num_nodes, num_features)"
            )
        self.y = _rows(y, name="y", num_nodes=self.num_nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        """Number of features of a node; 0 without features."""
        return 0 if self.x is None else self.x.shape[1]

    def neighbors(self, node: int) -> np.ndarray:
        """Return the nodes that send messages to ``node``; int32, shape ``(degree,)``.

        Raises:
            GraphError: the node does not exist.
        """
        if not 0 <= node < self.num_nodes:
            raise GraphError(f"there is no node {node}: {_nodes(self.num_nodes)}")
        return self.indices[self.indptr[node] : self.indptr[node + 1]]

    def degrees(self) -> np.ndarray:
        """Return the number of neighbours of each node; int64, shape ``(num_nodes,)``."""
        return np.diff(self.indptr)

    def replace(self, *, x: Any = None, y: Any = None) -> Graph:
        """Return a graph with other features or labels; None keeps the present ones.

        >>> graph = Graph(np.array([0, 1]), np.array([0], dtype=np.int32))
        >>> graph.replace(x=torch.ones(1, 4)).num_features
        4
        """
        return Graph(
            self.indptr,
            self.indices,
            x=self.x if x is None else x,
            y=self.y if y is None else y,
            check=False,
        )

    def __repr__(self) -> str:
        features = "" if self.x is None else f", num_features={self.num_features}"
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}{features})"


def as_array(values: Any, *, name: str) -> np.ndarray:
    """Return a tensor, an array or lists as a plain array, without a copy where possible.

    Raises:
        GraphError: the values do not form an array.
    """
    try:
        if isinstance(values, torch.Tensor):
            return values.detach().cpu().numpy()
        # For a memory-mapped array this is a view: it stays on disk, and kernels get a plain array.
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise GraphError(f"{name} cannot be read as an array: {error}") from error


def _row_starts(indptr: Any) -> np.ndarray:
    array = as_array(indptr, name="indptr")
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise GraphError(
            f"indptr has shape {array.shape} and dtype {array.dtype}; give int64 of shape "
            "(num_nodes + 1,)"
        )
    if len(array) - 1 > MAX_NODES:
        raise GraphError(
            f"{len(array) - 1} nodes: at most {MAX_NODES} can be numbered by int32"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _node_numbers(indices: Any, *, num_nodes: int) -> np.ndarray:
    array = as_array(indices, name="indices")
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise GraphError(
            f"indices have shape {array.shape} and dtype {array.dtype}; give int32 of shape "
            "(num_edges,)"
        )
    if not np.can_cast(array.dtype, np.int32):
        # Check before the numbers are cut down to 32 bits.
        _check_range(array, num_nodes=num_nodes)
    return np.ascontiguousarray(array, dtype=np.int32)


def _check_starts(indptr: np.ndarray, *, num_edges: int) -> None:
    if indptr[0] != 0 or indptr[-1] != num_edges:
        raise GraphError(
            f"indptr goes from {indptr[0]} to {indptr[-1]}; it must go from 0 to the number of "
            f"edges, {num_edges}"
        )
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if falls.size:
        raise GraphError(f"indptr falls after node {falls[0]}; it must never fall")


def _check_range(indices: np.ndarray, *, num_nodes: int) -> None:
    if not indices.size:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_nodes:
        bad = low if low < 0 else high
        where = int(np.flatnonzero(indices == bad)[0])
        raise GraphError(
            f"edge {where} comes from node {bad}, which does not exist: {_nodes(num_nodes)}"
        )


def _nodes(num_nodes: int) -> str:
    if not num_nodes:
        return "the graph has no nodes"
    return f"the graph has nodes 0 to {num_nodes - 1}"


def _rows(values: Any, *, name: str, num_nodes: int) -> torch.Tensor | None:
    if values is None:
        return None
    rows = as_tensor(values, name=name)
    if rows.layout != torch.strided:
        raise GraphError(f"{name} is sparse; give {name}.to_dense()")
    if rows.device.type != "cpu":
        raise GraphError(
            f"{name} lies on {rows.device}; batches are cut on the CPU and sent to the device, "
            f"so give {name}.cpu()"
        )
    if rows.dim() == 0 or len(rows) != num_nodes:
        raise GraphError(
            f"{name} has shape {tuple(rows.shape)}; give a row for each of the {num_nodes} nodes"
        )
    return rows.contiguous()


def as_tensor(values: Any, *, name: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    array = as_array(values, name=name)
    if not isinstance(values, np.ndarray) and array.dtype == np.float64:
        # Plain Python numbers become float32, as in torch.
        array = array.astype(np.float32)
    # torch supports neither negative strides nor foreign byte orders.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        with warnings.catch_warnings():
            # A read-only array, such as a file mapped for reading, will do: it is never written to.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError as error:
        raise GraphError(
            f"{name} holds {array.dtype}, of which there are no tensors"
        ) from error
