"""Memory of large tensors."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch


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
        keep: number of free buffers to keep; beyond it, a buffer that has long been free is
            released.
        allocate: returns the given number of bytes as uint8; None for ordinary memory. See
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
