"""Freezing of existing objects, so that the garbage collector skips them during a run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


SPARED_S = 60.0


@contextmanager
def spared_heap() -> Iterator[None]:
    """Freeze existing objects in this context so that the garbage collector skips them.

    With torch loaded, these are a quarter of a million objects, and one full collection takes
    0.3 s: as long as forty epochs of a small network. The objects are unfrozen after ``SPARED_S``
    seconds: in a run that long, a full collection costs little, and old garbage may hold a device's
    memory. A heap that other code has frozen is left unchanged.

    >>> frozen = gc.get_freeze_count() > 0
    >>> with spared_heap():
    ...     gc.get_freeze_count() > 0
    True
    >>> (gc.get_freeze_count() > 0) == frozen
    True
    """
    if gc.get_freeze_count():
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
