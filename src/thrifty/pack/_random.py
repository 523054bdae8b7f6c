"""The process's own random streams, borrowed and given back.

Models draw from torch's global generator (dropout), data sets perhaps from NumPy's or Python's.
While a trial trains they are seeded by (trial seed, step); afterwards whoever owns the process finds them as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def borrowed_streams() -> Iterator[None]:
    """Puts Python's, NumPy's and torch's global streams back when done."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (kept for its owner)
    torch_cpu = torch.get_rng_state()
    torch_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(torch_cpu)
        if torch_cuda:
            torch.cuda.set_rng_state_all(torch_cuda)


def seed_everything(seed: int) -> None:
    """Seeds the three global streams."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (user code may draw from it)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seeds torch's streams on the CPU and on GPUs in use.

    As ``torch.manual_seed``, which on a machine without a GPU notes every call down, with its stack, for
    the GPU that may come: 0.7 ms and some memory each time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_step(seed: int, device: torch.device) -> None:
    """Seeds what a training step draws from: torch's stream on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def loose_streams() -> tuple[Any, ...]:
    """Where Python's and NumPy's global streams are; steps do not seed these."""
    numpy = np.random.get_state()  # noqa: NPY002 (looked at, not drawn from)
    return (random.getstate(), numpy[2:], bytes(numpy[1]))
