"""Large tensors without page faults, for those who ask for it."""

from __future__ import annotations

import ctypes
import sys


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def tune_allocator() -> bool:
    """Lets the C library keep freed memory instead of giving it back to the system, for all of the process and for good.

    glibc maps each tensor above 32 MB anew, and the system clears its pages one fault after the other. Training on large blocks that
    makes many such tensors at each step is faster without; the process then keeps the most memory it ever had. Call it once, before
    training. Studies on ``GraphData`` do, unless they are told not to; nothing else in ``thrifty`` does.

    Returns:
        Whether the C library took it; False where it is not glibc.

    >>> isinstance(tune_allocator(), bool)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER)
    )
