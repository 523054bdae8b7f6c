"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of two sizes.

From the second on, it asks the system for each piece of memory. It gives free memory at the end of
the heap back if that is larger than the first.
"""

_MANY_BYTES = 2**24
_SMALL = 2**17
_LARGEST = 2**25
"""The second size that glibc itself arrives at in a process that frees large pieces.

The first is then twice as large.
"""


def trim_heap() -> None:
    """Give memory that this process has freed back to the system, where the C library can.

    glibc keeps what was freed for later. After work that needs much for a moment, that makes a
    process look as large as it ever was, and leaves less for others. It takes some milliseconds.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def freed_at_once(num_bytes: int) -> Iterator[None]:
    """Within the context, large pieces of memory go back to the system as soon as they are freed.

    Otherwise, glibc keeps them, and an aligned piece of the same size often does not fit where one
    was freed: work that makes and frees many tensors then takes several times the memory that it
    needs. New memory has to be cleared by the system, so this is for work that is done once, such
    as a dry run. It concerns all threads of the process.

    Args:
        num_bytes: Size of what the work is about; below 16 MiB, nothing changes.

    >>> with freed_at_once(2**30):
    ...     pass
    """
    if num_bytes < _MANY_BYTES:
        yield
        return
    with _LOCK:
        _within.append(None)
        if len(_within) == 1:
            _set_threshold(_SMALL)
    try:
        yield
    finally:
        with _LOCK:
            _within.pop()
            if not _within:
                _set_threshold(_LARGEST)
        trim_heap()


_LOCK = threading.Lock()
_within: list[None] = []
"""One entry for each context that is open, in any thread."""


def _set_threshold(size: int) -> None:
    set_option = _function("mallopt")
    if set_option is not None and _function("malloc_trim") is not None:  # glibc has both
        set_option(_M_MMAP_THRESHOLD, size)
        set_option(_M_TRIM_THRESHOLD, 2 * size)


@cache
def _function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # not a system with one C library for the process
        return None
