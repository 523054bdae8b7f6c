"""Memory: giving what is freed back to the system, and what the garbage collector skips."""

from __future__ import annotations

import atexit
import ctypes
import gc
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


SPARED_S = 60.0


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze existing objects in this context so that the garbage collector skips them.

    With torch loaded, these are a quarter of a million objects, and one full collection takes
    0.3 s: as long as forty epochs of a small network. The objects are unfrozen after ``SPARED_S``
    seconds: in a run that long, a full collection costs little, and old garbage may hold a device's
    memory. A heap that other code has frozen is left unchanged, until ``thaw_heap`` without looking
    again: counting frozen objects takes as long as a collection.
    """
    if _FROZEN_BY_OTHERS.is_set() or not _FREEZING.acquire(blocking=False):
        yield
        return
    try:
        if gc.get_freeze_count():
            _FROZEN_BY_OTHERS.set()
            yield
            return
        gc.freeze()
        later = threading.Timer(SPARED_S, gc.unfreeze)
        later.daemon = True
        later.start()
        try:
            yield
        finally:
            later.cancel()
            gc.unfreeze()
    finally:
        _FREEZING.release()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in this context, which only imports modules.

    torch and its compiler make a quarter of a million objects, and hardly any garbage. The
    collector looks through them many times, which takes a fifth of the time of the import.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gc_off_at_exit() -> None:
    """Let this process end without a last look through all objects.

    Python collects garbage once more when it ends. With torch loaded, this takes half a second, and
    frees what the end of the process frees anyway. Functions registered with ``atexit`` run before.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def thaw_heap() -> None:
    """Unfreeze all objects, so that ``gc.get_referrers`` and ``gc.get_objects`` look at them.

    They are not frozen again, because objects that have become garbage since would be frozen with
    them, and never be freed.

    >>> gc.freeze()
    >>> thaw_heap()
    >>> gc.get_freeze_count()
    0
    """
    gc.unfreeze()
    _FROZEN_BY_OTHERS.clear()


_FREEZING = threading.Lock()
_FROZEN_BY_OTHERS = threading.Event()
