"""Symmetric graphs, in which each edge has its reverse."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from thrifty.core import GraphError

from ._graph import Graph
from .kernels._csr import ADD, KEEP, REMOVE, reverse, unite_rows


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
        GraphError: an edge occurs more often than its reverse; the message names it.

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
        graph: graph to start from; it is not changed.
        self_loops: whether to keep the present edges from a node to itself, remove all of them,
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
