"""Sparing the garbage collector what was there before a run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


SPARED_S = 60.0


@contextmanager
def spared_heap() -> Iterator[None]:
    """Within, the garbage collector does not look through what was there before.

    With torch loaded that is a quarter of a million objects, and one full look takes 0.3 s: as long as forty epochs of a
    small network. It looks there again after ``SPARED_S`` seconds: that look is little beside so long a run, and garbage
    of before may hold a device's memory. A heap that somebody else has frozen is left as it is.

    >>> with spared_heap():
    ...     gc.get_freeze_count() > 0
    True
    >>> gc.get_freeze_count()
    0
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
