"""Graphs from NetworkX."""

from __future__ import annotations

from typing import Any

import numpy as np

from thrifty.core import GraphError

from ._edge_index import from_edge_index
from ._graph import Graph


def from_networkx(graph: Any, *, x: str | None = None, y: str | None = None) -> Graph:
    """Return a NetworkX graph as a ``Graph``, with nodes in the order of ``graph.nodes``.

    An undirected edge becomes one in each direction, parallel edges stay, and weights are ignored.

    Args:
        graph: ``Graph``, ``DiGraph``, ``MultiGraph`` or ``MultiDiGraph``.
        x: name of the node attribute that holds features, or None. Each node needs equally many
            numbers; a single number is one feature.
        y: name of the node attribute that holds labels, or None.

    Raises:
        GraphError: the graph is not from NetworkX, or a node lacks an attribute.

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
