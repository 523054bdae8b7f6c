"""Blocks and batches of a graph, and the memory of large tensors."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from thrifty.core import GraphError

from ._conversions import pyg_data


T = TypeVar("T")


class Block:
    """The edges of one layer in CSR form by destination; treat it as immutable.

    The destinations are the first of the sources.

    Args:
        indptr: Where each destination's edges begin and end; int32 or int64, shape
            ``(num_dst + 1,)``, non-decreasing, ``indptr[0] == 0``.
        indices: Numbers of source nodes in the batch; int32, shape ``(num_edges,)``.
        num_src: Number of source nodes, at least ``num_dst``.
        shared: Whether several trials will request the same aggregate of its input, so that
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
        return f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"

    def _destinations(self) -> torch.Tensor:
        counts = self.indptr.diff().long()
        return torch.repeat_interleave(
            torch.arange(self.num_dst, device=self.device), counts, output_size=self.num_edges
        )


def _version(value: object) -> int:
    """Return how often a tensor was changed in place, or 0 for anything else."""
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counted else 0  # type: ignore[attr-defined]


Mode = Literal["frontier", "full"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A sampled mini-batch: what a model needs to predict for its seeds.

    The first ``num_seeds`` nodes are the distinct seeds.

    Attributes:
        nodes: The nodes' numbers in the graph; int64, shape ``(num_nodes,)``.
        blocks: One block for each layer, the input layer's first.
        num_seeds: Number of distinct seeds; a model returns a row for each.
        seed_rows: The row of each requested seed, duplicates included; int64, shape
            ``(number of requested seeds,)``.
        hop_nodes: Number of new nodes at each hop, the seeds first; length ``layers + 1``.
        hop_edges: Number of edges sampled at each hop, the seeds' hop first; length ``layers``.
        mode: ``"frontier"`` or ``"full"``.
        x: Features of all nodes, shape ``(num_nodes, num_features)``, or None.
        y: Labels of the seeds, shape ``(num_seeds, ...)``, or None.
    """

    nodes: torch.Tensor
    blocks: tuple[Block, ...]
    num_seeds: int
    seed_rows: torch.Tensor
    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]
    mode: Mode
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None

    @property
    def seeds(self) -> torch.Tensor:
        """The distinct seeds; int64, shape ``(num_seeds,)``."""
        return self.nodes[: self.num_seeds]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, seeds included."""
        return len(self.nodes)

    @property
    def num_edges(self) -> int:
        """Number of sampled edges over all hops."""
        return sum(self.hop_edges)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on another device, or itself if it is already there."""
        # "cuda" without a number may be the device that the batch is on.
        if torch.empty(0, device=device).device == self.nodes.device:
            return self
        return copied(self, lambda array: array.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """Return a copy with arrays of its own, so that changes to it affect nothing else."""
        return copied(self, torch.clone)

    def double(self) -> Batch:
        """Return a copy with features and floating-point labels in double precision."""

        def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
            real = tensor is not None and tensor.is_floating_point()
            return tensor.double() if real else tensor  # type: ignore[union-attr]

        own = self.clone()
        return replace(own, x=doubled(own.x), y=doubled(own.y))

    def shared(self) -> Batch:
        """Return the batch marked for several trials, so that layers cache input aggregates.

        Each aggregate of the input features is then computed once for all trials. Results may
        differ from those of a batch that is not shared in the last bits, because layers choose
        another order of operations.
        """
        first, *rest = self.blocks
        first = Block(first.indptr, first.indices, num_src=first.num_src, shared=True)
        return replace(self, blocks=(first, *rest))

    def to_pyg(self) -> Any:
        """Return the batch as ``torch_geometric.data.Data``, as PyG's ``NeighborLoader`` does.

        It has these attributes:

        - ``x``
        - ``edge_index``: sources and destinations; int64, shape ``(2, num_edges)``
        - ``n_id``: node numbers in the graph
        - ``batch_size``: number of distinct seeds, which are the first nodes
        - ``num_sampled_nodes`` and ``num_sampled_edges``: lists
        - ``y``: labels of the seeds, unlike PyG's, which has those of all nodes

        PyG's models return a row for each node; the seeds' rows are ``out[: data.batch_size]``.

        Raises:
            GraphError: The batch was sampled with ``mode="full"``, where each layer has its own
                edges.
            MissingExtraError: PyG is not installed.
        """
        if self.mode != "frontier":
            raise GraphError(
                f'a batch sampled with mode="{self.mode}" has different edges at each layer, but '
                'PyG uses the same edges at every layer; sample with mode="frontier"'
            )
        return pyg_data(
            nodes=self.nodes,
            edge_index=self.blocks[0].edge_index(),
            hop_nodes=self.hop_nodes,
            hop_edges=self.hop_edges,
            x=self.x,
            y=self.y,
        )


def copied(batch: Batch, copy: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the batch with all arrays copied.

    Arrays that are parts of one array become parts of one copy, as blocks are of each other.
    """
    copies: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in copies:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            copies[key] = copy(whole)
        return copies[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return replace(
        batch,
        nodes=moved(batch.nodes),
        seed_rows=moved(batch.seed_rows),
        blocks=tuple(
            Block(
                moved(block.indptr),
                moved(block.indices),
                num_src=block.num_src,
                shared=block.shared,
            )
            for block in batch.blocks
        ),
        x=None if batch.x is None else moved(batch.x),
        y=None if batch.y is None else moved(batch.y),
    )


# -- memory of large tensors -----------------------------------------------------------------------


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def tune_allocator() -> bool:
    """Make the C library keep freed memory instead of returning it to the system.

    This holds for the whole process and cannot be undone. By default, glibc maps new memory for
    each tensor above 32 MB, and the system clears its pages one page fault at a time. Training on
    large blocks that makes many such tensors at each step is faster without that. In return, the
    process keeps the most memory it ever had. Call this once, before training. Studies on
    ``GraphData`` call it unless you tell them not to; nothing else in ``thrifty`` does.

    Returns:
        Whether the C library accepted the settings; False where it is not glibc.

    >>> isinstance(tune_allocator(), bool)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


ALIGNMENT = 64
"""Alignment in bytes: a cache line."""


class Memory:
    """A pool whose arrays return when the last tensor, view or graph that needs them is gone.

    Reuse saves a system call, and a page fault for each 4 KiB of a fresh large array. An array
    that is still referenced keeps its memory, so reuse is never visible. Any number of threads
    may borrow at once.

    Args:
        keep: Number of free buffers to keep; beyond it, a buffer that has long been free is
            released.
        allocate: Returns the given number of bytes as uint8; None for ordinary memory. See
            ``pinned_bytes``.

    >>> memory = Memory()
    >>> lent = memory.array((2, 3), torch.float32)
    >>> place = lent.data_ptr()
    >>> view = lent[1]
    >>> del lent
    >>> memory.num_free
    0
    >>> del view
    >>> memory.num_free, memory.array((3, 2), torch.float32).data_ptr() == place
    (1, True)
    """

    def __init__(
        self, *, keep: int = 8, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self._keep = keep
        self._allocate = _aligned_bytes if allocate is None else allocate
        # A deque and no lock: garbage collection may return a buffer at any moment, even in the
        # middle of a method of this class.
        self._free: deque[torch.Tensor] = deque(maxlen=keep)

    @property
    def num_free(self) -> int:
        """Number of buffers that wait for reuse."""
        return len(self._free)

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor on the CPU with arbitrary content."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        lent = np.asarray(_Lease(self._buffer(_rounded(num_bytes)), self._free, num_bytes))
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the settings only: free buffers are not worth sending to another process."""
        return _memory, (self._keep, self._allocate)

    def _buffer(self, size: int) -> torch.Tensor:
        """Return a buffer of this size, reused or new.

        The one that came back last goes first, because caches may still hold it.
        """
        for _ in range(self._keep):
            try:
                buffer = self._free.pop()
            except IndexError:
                break
            if len(buffer) == size:
                return buffer
            self._free.appendleft(buffer)
        return self._allocate(size)


class _Lease:
    """Owner of one array's bytes; NumPy keeps it alive as long as anything refers to them."""

    __slots__ = ("__array_interface__", "_buffer", "_home")

    def __init__(self, buffer: torch.Tensor, home: deque[torch.Tensor], num_bytes: int) -> None:
        self._buffer = buffer
        self._home = home
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
        }

    def __del__(self) -> None:
        # Atomic. If all places are taken, the deque drops the buffer at the other end.
        self._home.append(self._buffer)


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """Return page-locked memory, from which CUDA copies without the CPU.

    It is uint8 of shape ``(num_bytes,)``.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned_bytes(num_bytes: int) -> torch.Tensor:
    buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    first = -buffer.data_ptr() % ALIGNMENT
    return buffer[first : first + num_bytes]


def _rounded(num_bytes: int) -> int:
    """Round up to the next of 4, 5, 6 and 7 times a power of two.

    Batches differ by some nodes, and rounding lets them share one buffer size.
    """
    step = max(ALIGNMENT, 1 << max(num_bytes.bit_length() - 3, 0))
    return -(-num_bytes // step) * step


def _memory(keep: int, allocate: Callable[[int], torch.Tensor]) -> Memory:
    return Memory(keep=keep, allocate=allocate)
