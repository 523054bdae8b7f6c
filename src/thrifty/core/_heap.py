"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Give memory that this process has freed back to the system, where the C library can.

    glibc keeps what was freed for later. After work that needs much for a moment, that makes a
    process look as large as it ever was, and leaves less for others. It takes some milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # not a system with one C library for the process
        return None
