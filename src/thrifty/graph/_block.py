"""One layer of a message-flow graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch


T = TypeVar("T")


class Block:
    """The edges of one layer in CSR form by destination; treat it as immutable.

    The destinations are the first of the sources.

    Args:
        indptr: where each destination's edges begin and end; int32 or int64, shape
            ``(num_dst + 1,)``, non-decreasing, ``indptr[0] == 0``.
        indices: numbers of source nodes in the batch; int32, shape ``(num_edges,)``.
        num_src: number of source nodes, at least ``num_dst``.
        shared: whether several trials will request the same aggregate of its input, so that
            caching it pays.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([0, 1], dtype=torch.int32), num_src=2)
    >>> block
    Block(num_src=2, num_dst=1, num_edges=2)
    """

    __slots__ = ("_made", "indices", "indptr", "num_src", "shared")

    def __init__(
        self, indptr: torch.Tensor, indices: torch.Tensor, *, num_src: int, shared: bool = False
    ) -> None:
        self.indptr = indptr
        self.indices = indices
        self.num_src = num_src
        self.shared = shared
        self._made: dict[object, tuple[object, int]] = {}

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        """Device that holds the edges."""
        return self.indices.device

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, computed once for all layers and trials that use this block.

        >>> block = Block(torch.tensor([0]), torch.tensor([], dtype=torch.int32), num_src=0)
        >>> block.once("answer", lambda: 42), block.once("answer", lambda: 43)
        (42, 42)
        """
        value, version = self._made.get(key, (None, None))
        if version is None or version != _version(value):
            # Recompute a tensor that was changed in place.
            value = make()
            self._made[key] = value, _version(value)
        return value  # type: ignore[return-value]

    def destinations(self) -> torch.Tensor:
        """Return the destination of each edge; int64, shape ``(num_edges,)``."""
        return self.once("destinations", self._destinations)

    def edge_index(self) -> torch.Tensor:
        """Return all edges' sources and destinations as in PyG; int64, shape ``(2, num_edges)``."""
        return torch.stack([self.indices.long(), self.destinations()])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Block:
        """Return the block on another device, or itself if it is already there."""
        indptr = self.indptr.to(device, non_blocking=non_blocking)
        if indptr is self.indptr:
            # "cuda" without a number may be the device that the block is on.
            return self
        indices = self.indices.to(device, non_blocking=non_blocking)
        return Block(indptr, indices, num_src=self.num_src, shared=self.shared)

    def __repr__(self) -> str:
        return (
            f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"
        )

    def _destinations(self) -> torch.Tensor:
        counts = self.indptr.diff().long()
        return torch.repeat_interleave(
            torch.arange(self.num_dst, device=self.device), counts, output_size=self.num_edges
        )


def _version(value: object) -> int:
    """Return how often a tensor was changed in place, or 0 for anything else."""
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counted else 0  # type: ignore[attr-defined]
