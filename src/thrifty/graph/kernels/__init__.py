"""The inner loops, compiled by numba."""

from ._csr import COMPILED, mix, read_neighbors, wrapping
from ._neighbours import choose, count_edges, free_slots, num_taken, relabel_dense, relabel_hashed


__all__ = [
    "COMPILED",
    "choose",
    "count_edges",
    "free_slots",
    "mix",
    "num_taken",
    "read_neighbors",
    "relabel_dense",
    "relabel_hashed",
    "wrapping",
]
