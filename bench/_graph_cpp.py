"""The C++ twin of the sampler, compiled by the ``c++`` or ``g++`` on the path."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from thrifty.core import derive_seed
from thrifty.graph import Graph


SOURCE = Path(__file__).with_name("graph_sampler.cpp")


def compiler() -> str | None:
    """Return the compiler's path, or None."""
    return shutil.which("c++") or shutil.which("g++")


class CppSampler:
    """C++ sampler that samples as ``NeighborSampler(graph, fanouts)`` does, node for node.

    All ``fanouts`` are positive.
    """

    def __init__(self, graph: Graph, fanouts: list[int], *, most_seeds: int) -> None:
        library = Path(mkdtemp()) / "sampler.so"
        command = [compiler() or "c++", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
        self._function = ctypes.CDLL(str(library)).sample
        self._function.restype = None
        self._indptr = np.ascontiguousarray(graph.indptr)
        self._indices = np.ascontiguousarray(graph.indices)
        self._fanouts = np.array(fanouts, dtype=np.int64)
        rows, edges = most_seeds, 0
        total = most_seeds
        for fanout in fanouts:
            rows *= fanout
            edges, total = edges + rows, total + rows
        most_nodes = min(total, graph.num_nodes) + 1
        self._bits = max(graph.num_nodes - 1, 1).bit_length()
        self._table = np.zeros(graph.num_nodes, dtype=np.uint32)
        self._stamp = 0
        self._nodes = np.empty(most_nodes, dtype=np.int64)
        self._picks = np.empty(rows, dtype=np.int64)
        self._found = np.empty(rows, dtype=np.int32)
        self._starts = np.empty(most_nodes + 1, dtype=np.int32)
        self._edges = np.empty(edges, dtype=np.int32)
        self._counts = np.empty(3, dtype=np.int64)

    def sample(
        self, seeds: np.ndarray, *, epoch: int = 0, batch: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return nodes, row pointers and edges, in arrays that the caller may keep as ours."""
        self._stamp += 1
        if self._stamp >> (32 - self._bits):
            self._table.fill(0)
            self._stamp = 1
        keys = np.array(
            [derive_seed(0, "neighbors", epoch, batch, h) for h in range(len(self._fanouts))],
            dtype=np.uint64,
        )
        self._nodes[: len(seeds)] = seeds
        self._function(
            *map(_address, (self._indptr, self._indices, self._fanouts)),
            ctypes.c_int64(len(self._fanouts)),
            *map(_address, (keys, self._table)),
            ctypes.c_uint32(self._stamp),
            ctypes.c_uint32(self._bits),
            _address(self._nodes),
            ctypes.c_int64(len(seeds)),
            *map(_address, (self._picks, self._found, self._starts, self._edges, self._counts)),
        )
        num_nodes, num_edges, num_rows = self._counts.tolist()
        return (
            self._nodes[:num_nodes].copy(),
            self._starts[: num_rows + 1].copy(),
            self._edges[:num_edges].copy(),
        )


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
