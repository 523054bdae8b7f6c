"""Small graphs for tests, and batches as lists that can be compared."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from thrifty.graph import Graph


def graph_of(rows):
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return Graph(indptr, np.array([n for row in rows for n in row], dtype=np.int32))


def random_graph(num_nodes, num_edges, *, seed=0, isolated=0):
    """Return a random graph where low-numbered nodes have many neighbours.

    Nodes from ``num_nodes - isolated`` on have no neighbours.
    """
    rng = np.random.default_rng(seed)
    to = (rng.random(num_edges) ** 2 * (num_nodes - isolated)).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(to, minlength=num_nodes))])
    return Graph(indptr, rng.integers(0, num_nodes, num_edges).astype(np.int32))


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(0, 12))
    node = st.integers(0, num_nodes - 1)
    row = st.lists(node, max_size=9) if num_nodes else st.just([])
    return graph_of(draw(st.lists(row, min_size=num_nodes, max_size=num_nodes)))


@st.composite
def graphs_and_seeds(draw):
    graph = draw(graphs())
    node = st.integers(0, graph.num_nodes - 1)
    return graph, draw(st.lists(node, max_size=9) if graph.num_nodes else st.just([]))


def rows_of(block):
    indptr = block.indptr.tolist()
    return [block.indices[a:b].tolist() for a, b in pairwise(indptr)]


def as_lists(batch):
    blocks = [(b.indptr.tolist(), b.indices.tolist(), b.num_src) for b in batch.blocks]
    return batch.nodes.tolist(), batch.seed_rows.tolist(), blocks
