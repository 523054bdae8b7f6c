"""Memory that is used again when nobody can see it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch


ALIGNMENT = 64
"""Bytes; a cache line."""


class Memory:
    """Lends arrays whose memory comes back by itself when the last tensor, view or graph that needs it is gone.

    A system call and a page fault for each 4 KiB of a fresh large array are saved. Whoever keeps an array keeps its memory: no reuse is ever
    visible. Any number of threads may borrow at once.

    Args:
        keep: free buffers that are kept; beyond that one that was free for long is given up.
        allocate: gives that many bytes, uint8; None for ordinary memory. See ``pinned_bytes``.

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
        # a deque and no lock: a buffer may come back at any moment, also in the middle of a method of this class, when garbage is collected
        self._free: deque[torch.Tensor] = deque(maxlen=keep)

    @property
    def num_free(self) -> int:
        """Buffers that wait for being used again."""
        return len(self._free)

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU with arbitrary content."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        lent = np.asarray(_Lease(self._buffer(_rounded(num_bytes)), self._free, num_bytes))
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        """What is free is nothing to be sent to another process."""
        return _memory, (self._keep, self._allocate)

    def _buffer(self, size: int) -> torch.Tensor:
        """One of this size: the one that came back last, which caches may still hold, or a new one."""
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
    """Owner of the bytes of one array; NumPy keeps it alive as long as anything refers to them."""

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
        # atomic; where all places are taken, the buffer at the other end is given up
        self._home.append(self._buffer)


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """Page-locked memory, from which CUDA copies without the CPU; uint8, shape ``(num_bytes,)``."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned_bytes(num_bytes: int) -> torch.Tensor:
    buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    first = -buffer.data_ptr() % ALIGNMENT
    return buffer[first : first + num_bytes]


def _rounded(num_bytes: int) -> int:
    """The next of 4, 5, 6 and 7 times a power of two: batches differ by some nodes and should meet in one size."""
    step = max(ALIGNMENT, 1 << max(num_bytes.bit_length() - 3, 0))
    return -(-num_bytes // step) * step


def _memory(keep: int, allocate: Callable[[int], torch.Tensor]) -> Memory:
    return Memory(keep=keep, allocate=allocate)
