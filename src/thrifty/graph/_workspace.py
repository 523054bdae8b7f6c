"""Memory in which one thread samples one batch after another."""

from __future__ import annotations

import numpy as np

from thrifty.core import GraphError

from ._relabeler import Relabeler
from .kernels import choose, count_edges, read_neighbors


_MOST_EDGES = 2**31 - 1
_MOST_UNCOUNTED = 2**20
"""Number of edges for which room is made without counting them first."""


class Workspace:
    """The nodes and edges of the batch in progress, in arrays that grow and are reused.

    ``nodes[:num_nodes]`` are the nodes so far, ``edges[:num_edges]`` the numbers of the
    neighbours, row after row.
    """

    def __init__(self, relabeler: Relabeler) -> None:
        self._relabeler = relabeler
        self.nodes = np.empty(0, dtype=np.int64)
        self.edges = np.empty(0, dtype=np.int32)
        self._picks = np.empty(0, dtype=np.int64)
        self._found = np.empty(0, dtype=np.int32)
        self.num_nodes = self.num_edges = 0

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Begin a batch and return the row of each seed.

        ``seeds`` are int64 and all exist.
        """
        self.num_nodes = self.num_edges = 0
        self._relabeler.start()
        self.nodes = grown(self.nodes, len(seeds))
        rows = np.empty(len(seeds), dtype=np.int64)
        self.num_nodes = self._relabeler.number(seeds, self.nodes, num_nodes=0, out=rows)
        return rows

    def hop(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        *,
        first: int,
        fanout: int,
        replace: bool,
        key: np.uint64,
    ) -> np.ndarray:
        """Sample neighbours of the nodes from ``first`` on.

        Returns:
            Where the rows of their edges begin and end.

        Raises:
            GraphError: the batch has more edges than int32 can number.
        """
        rows = self.nodes[first : self.num_nodes]
        most = len(rows) * fanout
        if fanout < 0 or most > _MOST_UNCOUNTED:
            most = int(count_edges(indptr, rows, fanout, replace))
        if self.num_edges + most > _MOST_EDGES:
            raise GraphError(
                f"a batch has more than {_MOST_EDGES} edges; sample fewer seeds or smaller fanouts"
            )
        self._picks = grown(self._picks, most)
        starts = np.empty(len(rows) + 1, dtype=np.int32)
        starts[0] = self.num_edges
        num = int(choose(indptr, rows, fanout, replace, key, starts, self._picks))
        self._found = grown(self._found, num)
        found = self._found[:num]
        read_neighbors(indices, self._picks[:num], found)
        self.nodes = grown(self.nodes, self.num_nodes + num, keep=self.num_nodes)
        self.edges = grown(self.edges, self.num_edges + num, keep=self.num_edges)
        self.num_nodes = self._relabeler.number(
            found, self.nodes, num_nodes=self.num_nodes, out=self.edges[self.num_edges :]
        )
        self.num_edges += num
        return starts


def grown(array: np.ndarray, size: int, *, keep: int = 0) -> np.ndarray:
    """Return the array, or a larger one if it is shorter than ``size``.

    The larger array starts with the first ``keep`` entries.
    """
    if len(array) >= size:
        return array
    larger = np.empty(size + size // 4, dtype=array.dtype)
    larger[:keep] = array[:keep]
    return larger
