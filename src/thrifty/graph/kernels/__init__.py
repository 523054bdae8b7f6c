"""The inner loops, compiled by numba."""

from ._compile import COMPILED as COMPILED, mix as mix, wrapping as wrapping
from ._csr import read_neighbors as read_neighbors
from ._sampling import (
    choose as choose,
    count_edges as count_edges,
    free_slots as free_slots,
    num_taken as num_taken,
    relabel_dense as relabel_dense,
    relabel_hashed as relabel_hashed,
)


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
