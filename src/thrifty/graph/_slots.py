"""Batches in one piece of memory that several processes share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from ._batch import ALIGNMENT, Batch, Block, Mode
from ._features import gather_into


LEAST_BYTES = 2**16
"""Least size of a slot: the text of an error always fits."""

_MODES: tuple[Mode, ...] = ("frontier", "full")


class PageLock(Protocol):
    """What page-locks memory, so that a device copies from it without the CPU."""

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock memory, and return whether it is locked now."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock memory that ``lock`` has locked; nothing copies from it any more."""
        ...


class Slot:
    """Memory for one batch, which forked processes share and any of them can enlarge.

    It is a file without a name. The system removes it when the last process closes it.

    Args:
        num_bytes: Size to begin with.
    """

    def __init__(self, num_bytes: int = LEAST_BYTES) -> None:
        self._file = os.memfd_create("thrifty-batch")
        self._lock: PageLock | None = None
        self._locked = 0
        self.size = 0
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Enlarge the memory if it is smaller; its content is lost to views that exist."""
        if num_bytes > self.size:
            num_bytes = -(-max(num_bytes, LEAST_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._file, num_bytes)
            self.map(num_bytes)

    def map(self, size: int) -> None:
        """Map the memory again if another process has changed its size."""
        if size == self.size:
            return
        self._unlock()
        mapped = mmap.mmap(self._file, size)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.words = np.frombuffer(mapped, dtype=np.int64)
        self.size = size
        if self._lock is not None and self._lock.lock(self.bytes.data_ptr(), size):
            self._locked = self.bytes.data_ptr()

    def page_lock(self, lock: PageLock) -> None:
        """Page-lock the memory, also after it has grown."""
        self._lock = lock
        if lock.lock(self.bytes.data_ptr(), self.size):
            self._locked = self.bytes.data_ptr()

    def forget_lock(self) -> None:
        """Leave page-locking to the process that has asked for it; this one is a fork of it."""
        self._lock, self._locked = None, 0

    def close(self) -> None:
        """Unlock and release the memory in this process."""
        self._unlock()
        # Views of it keep the mapping; there are none, unless an exception holds one.
        del self.bytes, self.words
        os.close(self._file)

    def _unlock(self) -> None:
        if self._lock is not None and self._locked:
            self._lock.unlock(self._locked)
            self._locked = 0


class _Places:
    """Places of arrays in a slot, one after the other; equal storages get one place."""

    def __init__(self, first: int) -> None:
        self.end = _aligned(first)
        self._known: dict[int, int] = {}
        self.storages: list[tuple[int, torch.UntypedStorage]] = []

    def span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return where a one-dimensional tensor begins, in bytes, and its length."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            self._known[address] = self.room(storage.nbytes())
            self.storages.append((self._known[address], storage))
        first = self._known[address] + int(tensor.storage_offset()) * tensor.itemsize
        return first, len(tensor)

    def room(self, num_bytes: int) -> int:
        first = self.end
        self.end = _aligned(first + num_bytes)
        return first


def write_batch(
    slot: Slot, sampler: Any, seeds: np.ndarray, *, epoch: int, index: int, dtype: Any = None
) -> int:
    """Make the batch that ``make_batch`` makes, in a slot, which grows as needed.

    Args:
        slot: Memory that nothing else reads or writes.
        sampler: Sampler on the graph that has the features and labels.
        seeds: See ``make_batch``.
        epoch: See ``make_batch``.
        index: See ``make_batch``.
        dtype: See ``make_batch``.

    Returns:
        Number of bytes used. The slot begins with a header that ``read_header`` reads.
    """
    graph = sampler.graph
    batch = sampler.sample(seeds, epoch=epoch, batch=index)
    places = _Places(8 * _num_words(len(batch.blocks)))
    header = [
        len(batch.blocks),
        batch.num_seeds,
        _MODES.index(batch.mode),
        *places.span(batch.nodes),
        *places.span(batch.seed_rows),
    ]
    for block in batch.blocks:
        header += [*places.span(block.indptr), *places.span(block.indices), block.num_src]
    x_like = x_layout(graph, batch.num_nodes, dtype)
    y_like = y_layout(graph, batch.num_seeds)
    x_first, y_first = places.room(_num_bytes(x_like)), places.room(_num_bytes(y_like))
    header += [x_first, y_first, *batch.hop_nodes, *batch.hop_edges]
    slot.grow(places.end)
    slot.words[: len(header)] = header
    for first, storage in places.storages:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        slot.bytes[first : first + len(whole)] = whole
    if graph.x is not None:
        gather_into(graph.x, batch.nodes, _part(slot.bytes, x_first, x_like))
    if graph.y is not None:
        out = _part(slot.bytes, y_first, y_like)
        torch.index_select(graph.y, 0, batch.seeds, out=out)
    return places.end


def read_header(slot: Slot) -> list[int]:
    """Return the numbers that describe the batch in a slot, for ``read_batch``."""
    return slot.words[: _num_words(int(slot.words[0]))].tolist()  # type: ignore[no-any-return]


def read_batch(whole: torch.Tensor, header: Sequence[int], *, graph: Any, dtype: Any) -> Batch:
    """Return the batch whose arrays are parts of ``whole``.

    Args:
        whole: The used bytes of a slot, or a copy of them on any device; uint8, from the beginning
            of its storage.
        header: What ``read_header`` returned.
        graph: The sampler's graph.
        dtype: Dtype that the batch was written with.
    """
    layers, num_seeds, mode, nodes, num_nodes, rows, num_rows = header[:7]
    # One view for each dtype; the parts of it then take one operation each.
    longs, ints = whole.view(torch.int64), whole.view(torch.int32)
    part = torch.as_strided
    blocks, at = [], 7
    for _ in range(layers):
        starts, num_starts, edges, num_edges, num_src = header[at : at + 5]
        blocks.append(
            Block(
                part(ints, (num_starts,), (1,), starts // 4),
                part(ints, (num_edges,), (1,), edges // 4),
                num_src=num_src,
            )
        )
        at += 5
    x = y = None
    # `data` has a version counter of its own: a change of x or y is none of the other arrays.
    if graph.x is not None:
        x = _strided(whole, header[at], x_layout(graph, num_nodes, dtype)).data
    if graph.y is not None:
        y = _strided(whole, header[at + 1], y_layout(graph, num_seeds)).data
    at += 2
    return Batch(
        nodes=part(longs, (num_nodes,), (1,), nodes // 8),
        blocks=tuple(blocks),
        num_seeds=num_seeds,
        seed_rows=part(longs, (num_rows,), (1,), rows // 8),
        hop_nodes=tuple(header[at : at + layers + 1]),
        hop_edges=tuple(header[at + layers + 1 : at + 2 * layers + 1]),
        mode=_MODES[mode],
        x=x,
        y=y,
    )


_Layout = tuple[torch.dtype, tuple[int, ...]]


def x_layout(graph: Any, num_nodes: int, dtype: Any) -> _Layout:
    """Return dtype and shape of a batch's features."""
    if graph.x is None:
        return torch.uint8, (0,)
    return graph.x.dtype if dtype is None else dtype, (num_nodes, graph.x.shape[1])


def y_layout(graph: Any, num_seeds: int) -> _Layout:
    """Return dtype and shape of a batch's labels."""
    if graph.y is None:
        return torch.uint8, (0,)
    return graph.y.dtype, (num_seeds, *graph.y.shape[1:])


def _num_bytes(like: _Layout) -> int:
    return prod(like[1]) * like[0].itemsize


def _part(whole: torch.Tensor, first: int, like: _Layout) -> torch.Tensor:
    dtype, shape = like
    return whole[first : first + _num_bytes(like)].view(dtype).view(shape)


def _strided(whole: torch.Tensor, first: int, like: _Layout) -> torch.Tensor:
    dtype, shape = like
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return whole.view(dtype).as_strided(shape, steps, first // dtype.itemsize)


def _num_words(layers: int) -> int:
    return 7 + 5 * layers + 2 + 2 * layers + 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
