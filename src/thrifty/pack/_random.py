"""The process's global random streams, borrowed and restored.

Models draw from torch's global generator (dropout), data sets perhaps from NumPy's or Python's.
While a trial trains, these are seeded by (trial seed, step). Afterwards the process finds its
streams as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


@contextmanager
def borrowed_streams() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global streams on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (kept to be restored)
    torch_cpu = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    torch_cuda = torch.cuda.get_rng_state_all() if in_use else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(torch_cpu)
        if torch_cuda:
            torch.cuda.set_rng_state_all(torch_cuda)


def seed_everything(seed: int) -> None:
    """Seed the three global streams."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (user code may draw from it)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's streams on the CPU and on GPUs in use.

    Use this instead of ``torch.manual_seed``: on a machine without a GPU, that records every call
    and its stack for a GPU initialised later, which costs 0.7 ms and some memory each time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the streams that a training step draws from: torch's on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def loose_streams() -> tuple[Any, ...]:
    """Return the positions of Python's and NumPy's global streams, which steps do not seed."""
    # The state is only read, nothing is drawn.
    numpy = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return (random.getstate(), numpy[2:], bytes(numpy[1]))
