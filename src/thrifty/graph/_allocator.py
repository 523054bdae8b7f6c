"""Optional allocator tuning that avoids page faults for large tensors."""

from __future__ import annotations

import ctypes
import sys


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
    return mallopt is not None and bool(
        mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER)
    )
