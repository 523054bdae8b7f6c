"""Probabilities of nodes to be part of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thrifty.core import GraphError, check_integers

from ._graph import Graph, as_array, checked_nodes
from ._sampler import NeighborSampler
from .kernels._sampling import push


def inclusion_probabilities(
    graph: Graph, seeds: Any, fanouts: Sequence[int], *, batch_size: int
) -> np.ndarray:
    """Return each node's probability to be in a batch, with one pass over the edges for each hop.

    After SALIENT++ (Kaler et al., MLSys 2023; vertex inclusion probabilities). The estimate
    assumes that nodes are sampled independently of each other and without replacement, and counts
    a path that returns to a node as one to another node. It is exact on trees that lead away from
    the seeds, and slightly too high where many edges have their reverse. The order of nodes, which
    is its purpose, suffers little.

    Args:
        graph: graph to sample from.
        seeds: nodes that batches are drawn from, shape ``(num,)``; a node that is listed several
            times is drawn more often.
        fanouts: neighbours of each node at each hop, the seeds' hop first; -1 for all.
        batch_size: number of seeds in a batch, drawn without replacement.

    Returns:
        float64, shape ``(num_nodes,)``.

    Raises:
        GraphError: a seed does not exist, or fanouts or batch size are invalid.

    >>> star = Graph(np.array([0, 4, 4, 4, 4, 4]), np.array([1, 2, 3, 4], dtype=np.int32))
    >>> inclusion_probabilities(star, [0, 1], [2], batch_size=1)
    array([0.5  , 0.625, 0.25 , 0.25 , 0.25 ])
    """
    hops = NeighborSampler(graph, fanouts, relabel="hash").fanouts
    nodes = checked_nodes(seeds, num_nodes=graph.num_nodes, name="seed")
    check_integers(GraphError, 1, batch_size=batch_size)
    degrees = graph.degrees()
    # With logarithms of the probability to be left out, products become sums, and rare nodes stay
    # exact.
    with np.errstate(divide="ignore"):
        left_out = _undrawn(nodes, batch_size, num_nodes=graph.num_nodes)
        reached = np.abs(np.expm1(left_out))
        for fanout in hops:
            spread = np.zeros(graph.num_nodes)
            weights = np.log1p(-reached * _taken(degrees, fanout))
            push(graph.indptr, graph.indices, weights, spread)
            reached = np.abs(np.expm1(spread))
            left_out += spread
    return np.abs(np.expm1(left_out))  # type: ignore[no-any-return]


def top_nodes(probabilities: Any, num: int) -> np.ndarray:
    """Return the most probable nodes in descending order; ties go to the lower number.

    Nodes of probability zero are left out.

    Args:
        probabilities: probability of each node, shape ``(num_nodes,)``; counts or degrees work
            as well.
        num: maximum number of nodes.

    Returns:
        int64, shape ``(num or fewer,)``.

    Raises:
        GraphError: the probabilities are not a vector of numbers or contain NaN, or ``num`` is
            negative.

    >>> top_nodes([0.1, 0.5, 0.0, 0.5], 2)
    array([1, 3])
    """
    values = as_array(probabilities, name="probabilities")
    if values.ndim != 1 or (values.dtype.kind not in "biuf" and values.size):
        raise GraphError(
            f"probabilities have shape {values.shape} and dtype {values.dtype}; give numbers "
            "of shape (num_nodes,)"
        )
    if np.isnan(values).any():
        raise GraphError(f"the probability of node {np.isnan(values).argmax()} is not a number")
    check_integers(GraphError, 0, num=num)
    nodes = np.flatnonzero(values > 0)
    if num < len(nodes):
        nodes = nodes[_places_of_largest(values[nodes], int(num))]
    return nodes[np.argsort(-values[nodes].astype(np.float64), kind="stable")]


def _undrawn(nodes: np.ndarray, batch_size: int, *, num_nodes: int) -> np.ndarray:
    """Return the log-probability of each node not to be among the seeds of a batch."""
    ordered = np.sort(nodes)
    # For the n-th copy of a node, given that the copies before it were not drawn.
    copy = np.arange(len(nodes)) - np.searchsorted(ordered, ordered)
    chance = np.minimum(1.0, batch_size / (len(nodes) - copy))
    logs: np.ndarray = np.bincount(ordered, weights=np.log1p(-chance), minlength=num_nodes)
    # bincount returns integers if there are no seeds.
    return logs.astype(np.float64)


def _taken(degrees: np.ndarray, fanout: int) -> np.ndarray:
    """Return the probability that an edge of each node is taken."""
    if fanout < 0:
        return np.ones(len(degrees))
    taken: np.ndarray = np.minimum(1.0, fanout / np.maximum(degrees, 1))
    return taken


def _places_of_largest(values: np.ndarray, num: int) -> np.ndarray:
    # A partial sort gives the threshold, but not which of several equal values come first.
    if not num:
        return np.empty(0, dtype=np.int64)
    least = np.partition(values, len(values) - num)[len(values) - num]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: num - len(above)]
    return np.sort(np.concatenate([above, equal]))
