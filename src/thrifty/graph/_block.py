"""One layer of a message-flow graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch


T = TypeVar("T")


class Block:
    """Who sends to whom in one layer: CSR by destination; the destinations are the first of the sources. Not to be changed.

    Args:
        indptr: int32 or int64, shape ``(num_dst + 1,)``, not falling, ``indptr[0] == 0``.
        indices: int32, shape ``(num_edges,)``: numbers of source nodes in the batch.
        num_src: source nodes, at least ``num_dst``.
        shared: whether several trials will ask for the same aggregate of its input, so that it is worth being made once.

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
        """Destination nodes."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Edges."""
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.indices.device

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` gives, made once for all layers and trials that see this block.

        >>> block = Block(torch.tensor([0]), torch.tensor([], dtype=torch.int32), num_src=0)
        >>> block.once("answer", lambda: 42), block.once("answer", lambda: 43)
        (42, 42)
        """
        value, version = self._made.get(key, (None, None))
        if version is None or version != _version(value):
            # A tensor that somebody has changed in place is made anew.
            value = make()
            self._made[key] = value, _version(value)
        return value  # type: ignore[return-value]

    def destinations(self) -> torch.Tensor:
        """The destination of each edge; int64, shape ``(num_edges,)``."""
        return self.once("destinations", self._destinations)

    def edge_index(self) -> torch.Tensor:
        """Sources and destinations of all edges as PyG has them; int64, shape ``(2, num_edges)``."""
        return torch.stack([self.indices.long(), self.destinations()])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Block:
        """The same on another device; itself if it is there already."""
        indptr = self.indptr.to(device, non_blocking=non_blocking)
        if indptr is self.indptr:
            # "cuda" may be where it lies, whatever number that is
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
    """How often a tensor was changed in place; 0 for anything else."""
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counted else 0  # type: ignore[attr-defined]
