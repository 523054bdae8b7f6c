"""The garbage collector: make it skip what existed before a run, and undo that."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
