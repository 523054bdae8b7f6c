"""Graphs for ``bench_graph``: R-MAT of any size, and real ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

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


_CHUNK = 2**20
"""Edges or rows that a thread draws at once."""

_Draw = Callable[[int, int], None]


@numba.njit(cache=True, nogil=True)
def _rmat_edges(
    scale: int, seed: int, names: np.ndarray, out: np.ndarray, begin: int, end: int
) -> None:
    """Draw the edges from ``begin`` to ``end``, each from its own random numbers (SplitMix64)."""
    a, ab, abc = np.uint64(A * 2.0**32), np.uint64(AB * 2.0**32), np.uint64(ABC * 2.0**32)
    golden = np.uint64(0x9E3779B97F4A7C15)
    for e in range(begin, end):
        state = (np.uint64(seed) << np.uint64(40)) + np.uint64(e)
        state = state * np.uint64(64) * golden
        word = np.uint64(0)
        source = target = 0
        for level in range(scale):
            if level & 1:
                u = word >> np.uint64(32)
            else:
                state += golden
                word = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                word ^= word >> np.uint64(31)
                u = word & np.uint64(0xFFFFFFFF)
            source = 2 * source + int(u >= ab)
            target = 2 * target + int((u >= a and u < ab) or u >= abc)
        out[0, e], out[1, e] = names[source], names[target]


def rmat(
    scale: int, num_edges: int, *, num_features: int = 0, num_classes: int = 47, seed: int = 0
) -> Graph:
    """Return an R-MAT graph of ``2**scale`` nodes, with random features and labels.

    Nodes are numbered at random, so that hubs are not neighbours in memory. All cores draw, and
    the graph does not depend on their number.
    """
    num_nodes = 2**scale
    names = np.random.default_rng(seed).permutation(num_nodes).astype(np.int32)
    edges = np.empty((2, num_edges), dtype=np.int32)
    _in_threads(num_edges, partial(_rmat_edges, scale, seed, names, edges))
    x = y = None
    if num_features:
        x = torch.empty(num_nodes, num_features)

        def draw(begin: int, end: int) -> None:
            rng = np.random.default_rng([seed, begin])
            rng.standard_normal(dtype=np.float32, out=x[begin:end].numpy())

        _in_threads(num_nodes, draw)
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(num_classes, (num_nodes,), generator=generator)
    return from_edge_index(edges, num_nodes=num_nodes, x=x, y=y)


def _in_threads(num: int, draw: _Draw) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        cuts = [*range(0, num, _CHUNK), num]
        list(threads.map(draw, cuts[:-1], cuts[1:]))


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
