"""Graphs for ``bench_graph``: R-MAT of any size, and real ones."""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD

from bench.common.harness import data_file
from thrifty.graph import Graph, from_edge_index


A, AB, ABC = 0.57, 0.76, 0.95
"""Cumulated quadrant probabilities of R-MAT (Chakrabarti, Zhan and Faloutsos, SDM 2004).

The values are Graph500's.
"""


@numba.njit(cache=True)
def _rmat_edges(scale: int, num_edges: int, seed: int) -> np.ndarray:
    np.random.seed(seed)  # numba's own stream # noqa: NPY002
    out = np.empty((2, num_edges), dtype=np.int32)
    for e in range(num_edges):
        source = target = 0
        for _ in range(scale):
            u = np.random.random()  # noqa: NPY002
            source = 2 * source + (u >= AB)
            target = 2 * target + ((u >= A and u < AB) or u >= ABC)
        out[0, e], out[1, e] = source, target
    return out


@numba.njit(cache=True)
def _shuffled(edges: np.ndarray, names: np.ndarray) -> None:
    for i in range(edges.shape[0]):
        for e in range(edges.shape[1]):
            edges[i, e] = names[edges[i, e]]


def rmat(
    scale: int, num_edges: int, *, num_features: int = 0, num_classes: int = 47, seed: int = 0
) -> Graph:
    """Return an R-MAT graph of ``2**scale`` nodes, with random features and labels.

    Nodes are numbered at random, so that hubs are not neighbours in memory.
    """
    rng = np.random.default_rng(seed)
    edges = _rmat_edges(scale, num_edges, seed)
    num_nodes = 2**scale
    _shuffled(edges, rng.permutation(num_nodes).astype(np.int32))
    x = y = None
    if num_features:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_nodes, num_features, generator=generator)
        y = torch.randint(num_classes, (num_nodes,), generator=generator)
    return from_edge_index(edges, num_nodes=num_nodes, x=x, y=y)


def connected(graph: Graph) -> np.ndarray:
    """Return the nodes that have neighbours."""
    return np.flatnonzero(graph.degrees() > 0)


@cache
def real(name: str, *, num_components: int = 0) -> Graph:
    """Load ``amazon_cs``, ``coauthor_cs``, ... with all features or their first components."""
    with np.load(data_file("graphs", f"{name}.npz")) as file:
        parts = dict(file)
    values = parts.get("x_data", np.ones(len(parts["x_indices"]), dtype=np.float32))
    features = csr_matrix(
        (values, parts["x_indices"], parts["x_indptr"]), shape=tuple(parts["x_shape"])
    )
    if num_components:
        svd = TruncatedSVD(num_components, random_state=0)
        x = svd.fit_transform(features).astype(np.float32)
        x /= x.std()
    else:
        x = features.toarray().astype(np.float32)
    return Graph(
        parts["indptr"],
        parts["indices"],
        x=torch.from_numpy(np.ascontiguousarray(x)),
        y=torch.from_numpy(parts["y"].astype(np.int64)),
    )


def split(num: int, *, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split nodes into 60 % for training, 20 % for choosing and 20 % for reporting."""
    order = np.random.default_rng(seed).permutation(num)
    first, second = int(0.6 * num), int(0.8 * num)
    return order[:first], order[first:second], order[second:]
