"""Denormal numbers: below 1e-38 a CPU computes ten to a hundred times slower, for digits that nobody will ever see.

The momentum of a dead unit shrinks into that range and stays there, so that an optimiser slows down as training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Takes them for zero while a pack is trained; afterwards this thread is as it was."""
    # torch can set the mode but not tell it: the product of two normal numbers shows
    flushed = bool(torch.tensor(1e-30) * torch.tensor(1e-10) == 0)
    if not flushed:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if not flushed:
            torch.set_flush_denormal(False)
