"""Batch-local node numbers: a dense table, or a hash table where that would be too large."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from .kernels import free_slots, relabel_dense, relabel_hashed


_FEWEST_SLOTS = 2**15
_SLOTS_OF_NODE = 4
"""Slots of the hash table for each node, so that few nodes need a second probe."""
_SPARE = 16
"""The table grows when at most one in this many of its slots may still be taken."""


class Relabeler(ABC):
    """Numbers for the nodes of one batch at a time.

    Each number is the position of the node in ``nodes``.
    """

    @abstractmethod
    def start(self) -> None:
        """Forget all nodes."""

    @abstractmethod
    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """


class DenseRelabeler(Relabeler):
    """A dense table with 4 bytes for each node of the graph.

    It is cleared only once in ``2**(32 - bits)`` batches.
    """

    def __init__(self, num_nodes: int) -> None:
        self._bits = max(num_nodes - 1, 1).bit_length()
        self._table = np.zeros(num_nodes, dtype=np.uint32)
        self._stamp = 0

    def start(self) -> None:
        """Forget all nodes."""
        self._stamp += 1
        if self._stamp >> (32 - self._bits):
            self._table.fill(0)
            self._stamp = 1

    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """
        table = self._table
        return int(relabel_dense(found, table, self._stamp, self._bits, nodes, num_nodes, out))


class HashRelabeler(Relabeler):
    """A hash table with 10 bytes for each of four to eleven times the largest batch's nodes."""

    def __init__(self) -> None:
        self._num_used = 0
        self._make(_FEWEST_SLOTS)

    def start(self) -> None:
        """Forget all nodes."""
        free_slots(self._keys, self._slots[: self._num_used])
        self._num_used = 0

    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """
        done = 0
        while done < len(found):
            room = len(self._keys) // _SLOTS_OF_NODE - num_nodes
            if room <= len(self._keys) // _SPARE:
                self._grow(nodes[:num_nodes])
                continue
            # In parts: of a million edges, only a few thousand nodes may be new, so do not make
            # room for a million.
            part = found[done : done + room]
            num_nodes = self._number(part, nodes, num_nodes=num_nodes, out=out[done:])
            self._num_used = num_nodes
            done += len(part)
        return num_nodes

    def _grow(self, known: np.ndarray) -> None:
        self._make(2 * len(self._keys))
        nodes, out = np.empty_like(known), np.empty(len(known), dtype=np.int32)
        self._number(known, nodes, num_nodes=0, out=out)

    def _number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        keys, values, slots = self._keys, self._values, self._slots
        return int(relabel_hashed(found, keys, values, slots, nodes, num_nodes, out))

    def _make(self, num_slots: int) -> None:
        self._keys, self._values, self._slots = (
            np.full(num_slots, -1, dtype=np.int32),
            np.empty(num_slots, dtype=np.int32),
            np.empty(num_slots // _SLOTS_OF_NODE, dtype=np.int64),
        )
