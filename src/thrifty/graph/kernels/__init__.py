"""The inner loops, compiled by numba."""

from ._choose import choose as choose, count_edges as count_edges, num_taken as num_taken
from ._compile import COMPILED as COMPILED, wrapping as wrapping
from ._random import mix as mix
from ._read import read_neighbors as read_neighbors
from ._relabel import (
    free_slots as free_slots,
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
