"""Graphs, how they are checked and made symmetric."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import numpy as np
import torch

from thrifty.core import GraphError

from .kernels._csr import ADD, KEEP, REMOVE, reverse, unite_rows


def checked_nodes(nodes: Any, *, num_nodes: int, name: str) -> np.ndarray:
    """Return node numbers as int64, shape ``(num,)``.

    Args:
        nodes: Node numbers to check.
        num_nodes: Number of nodes in the graph.
        name: What error messages call one of the nodes.

    Raises:
        GraphError: The numbers are not integers, or a node does not exist.
    """
    array = _array(nodes, name=name)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        hint = "; give np.flatnonzero(mask) for a mask" if array.dtype.kind == "b" else ""
        raise GraphError(
            f"{name}s have shape {array.shape} and dtype {array.dtype}; give node numbers, "
            f"integers of shape (num,){hint}"
        )
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= num_nodes:
            bad = low if low < 0 else high
            there = f"nodes 0 to {num_nodes - 1}" if num_nodes else "no nodes"
            raise GraphError(f"{name} {bad} does not exist: the graph has {there}")
    # Kernels are compiled for one kind of array.
    return np.require(array, np.int64, ["C", "W"])


def _array(nodes: Any, *, name: str) -> np.ndarray:
    if isinstance(nodes, torch.Tensor):
        # NumPy does not know all dtypes of torch; none of those it lacks are integers.
        tensor = nodes.detach().cpu()
        return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    try:
        return np.asarray(nodes)
    except ValueError as error:
        raise GraphError(
            f"{name}s are no array: {error}; give node numbers, integers of shape (num,)"
        ) from None


SelfLoops = Literal["keep", "remove", "add"]
_LOOPS = {"keep": KEEP, "remove": REMOVE, "add": ADD}
_Rows = tuple[np.ndarray, np.ndarray]


def is_symmetric(graph: Graph) -> bool:
    """Return whether each edge occurs as often as its reverse, in time linear in edges and nodes.

    >>> is_symmetric(Graph([0, 1, 2], [1, 0])), is_symmetric(Graph([0, 1, 1], [1]))
    (True, False)
    """
    return _same(*_both_ways(graph))


def check_symmetric(graph: Graph) -> None:
    """Raise an error unless each edge occurs as often as its reverse.

    Raises:
        GraphError: An edge occurs more often than its reverse; the message names it.

    >>> check_symmetric(Graph([0, 1, 2], [1, 0]))
    """
    forth, back = _both_ways(graph)
    if not _same(forth, back):
        source, destination = _unreturned(forth, back)
        raise GraphError(
            f"the edge from node {source} to node {destination} occurs more often than its "
            "reverse; "
            "symmetric(graph) adds what is missing"
        )


def symmetric(graph: Graph, *, self_loops: SelfLoops = "keep") -> Graph:
    """Return the graph with the reverse of each edge, each edge once.

    Neighbours are in ascending order; features and labels stay the same.

    Args:
        graph: Graph to start from; it is not changed.
        self_loops: Whether to keep the present edges from a node to itself, remove all of them,
            or add one to each node.

    Raises:
        GraphError: ``self_loops`` is none of these.

    >>> both = symmetric(Graph([0, 1, 1], [1]))
    >>> both.neighbors(0), both.neighbors(1)
    (array([1], dtype=int32), array([0], dtype=int32))
    """
    if self_loops not in _LOOPS:
        options = ", ".join(map(repr, get_args(SelfLoops)))
        raise GraphError(f"self_loops={self_loops!r}; it must be one of {options}")
    forth, back = _both_ways(graph)
    loops = _LOOPS[self_loops]
    indptr = np.zeros(graph.num_nodes + 1, dtype=np.int64)
    unite_rows(forth, back, loops, indptr, np.empty(0, dtype=np.int32))
    indices = np.empty(indptr[-1], dtype=np.int32)
    unite_rows(forth, back, loops, indptr, indices)
    return Graph(indptr, indices, x=graph.x, y=graph.y, check=False)


def _both_ways(graph: Graph) -> tuple[_Rows, _Rows]:
    """Return the rows of the graph and those of its reverse, both in ascending order."""
    back = _reversed((graph.indptr, graph.indices))
    # Reversing sorts, so reversing twice gives the graph itself, sorted.
    return _reversed(back), back


def _reversed(rows: _Rows) -> _Rows:
    starts, out = np.zeros_like(rows[0]), np.empty_like(rows[1])
    reverse(*rows, starts, out)
    return starts, out


def _same(forth: _Rows, back: _Rows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(forth, back, strict=True))


def _unreturned(forth: _Rows, back: _Rows) -> tuple[int, int]:
    """Return source and destination of the first edge that occurs more often than its reverse."""
    degrees_differ = np.flatnonzero(np.diff(forth[0]) != np.diff(back[0]))
    first = np.flatnonzero(forth[1] != back[1])
    node = int(degrees_differ[0]) if degrees_differ.size else len(forth[0])
    if first.size:
        node = min(node, int(np.searchsorted(forth[0], first[0], side="right")) - 1)
    into, out_of = (rows[1][rows[0][node] : rows[0][node + 1]] for rows in (forth, back))
    others, places = np.unique(np.concatenate([into, out_of]), return_inverse=True)
    signs = np.repeat([1, -1], [len(into), len(out_of)])
    balance = np.bincount(places, weights=signs)
    odd = np.flatnonzero(balance)[0]
    other = int(others[odd])
    return (other, node) if balance[odd] > 0 else (node, other)


FEATURE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NODES = 2**31 - 1


class Graph:
    """A graph in CSR form by destination; treat it as immutable.

    Messages to node ``v`` come from ``indices[indptr[v]:indptr[v + 1]]``. You may pass arrays,
    tensors or lists. Contiguous ones that have the dtype named below are not copied, and
    memory-mapped ones stay on disk.

    Args:
        indptr: Where each node's neighbours begin and end; int64, shape ``(num_nodes + 1,)``.
        indices: Neighbours of all nodes; int32, shape ``(num_edges,)``.
        x: Features, float32, bfloat16 or float16, shape ``(num_nodes, num_features)``.
        y: Labels, shape ``(num_nodes, ...)``.
        check: Whether to check ranges (one pass over the edges).

    Raises:
        GraphError: A shape, dtype or range is wrong; the message says where.

    >>> graph = Graph(np.array([0, 1, 3]), np.array([1, 0, 1], dtype=np.int32))
    >>> graph
    Graph(num_nodes=2, num_edges=3)
    >>> graph.neighbors(1)
    array([0, 1], dtype=int32)
    """

    __slots__ = ("indices", "indptr", "x", "y")

    def __init__(
        self, indptr: Any, indices: Any, *, x: Any = None, y: Any = None, check: bool = True
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
            GraphError: The node does not exist.
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
        GraphError: The values do not form an array.
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
        raise GraphError(f"{len(array) - 1} nodes: at most {MAX_NODES} can be numbered by int32")
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
    if isinstance(values, torch.Tensor) and values.requires_grad:
        # Batches are copies of rows, which no gradient leads back from.
        raise GraphError(
            f"{name} requires gradients, but a graph's {name} is never trained; give "
            f"{name}.detach(), or keep trained rows in the model, such as in an nn.Embedding that "
            "reads batch.nodes"
        )
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
        raise GraphError(f"{name} holds {array.dtype}, of which there are no tensors") from error
