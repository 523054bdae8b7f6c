"""Counts of the work that a function does, which a busy machine cannot change."""

from __future__ import annotations

import sys
from collections.abc import Callable


def lines_run(function: Callable[[], object]) -> int:
    """Run a function and return how many lines of Python it executed."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
