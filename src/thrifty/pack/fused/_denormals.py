"""Flushing of denormal numbers, on which a CPU is ten to a hundred times slower.

Denormal numbers are below 1e-38, too small to matter for any result. The momentum of a dead unit
shrinks into that range and stays there, so an optimizer slows down as training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat denormal numbers as zero while a pack trains, then restore this thread's mode."""
    # torch can set the mode but cannot report it, so multiply two normal numbers to find out
    flushed = bool(torch.tensor(1e-30) * torch.tensor(1e-10) == 0)
    if not flushed:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if not flushed:
            torch.set_flush_denormal(False)
