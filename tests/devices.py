"""The devices on which tests train: the CPU, and a GPU where there is one.

A test that takes the fixture ``device`` runs once on each of them. Helpers that make tensors or
back-ends make them ``here()``. ``pytest --device cuda`` runs these tests on the GPU, and no others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.utils.deterministic


NAMES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))

_here = torch.device("cpu")


def here() -> torch.device:
    """Return the device of the test that is running."""
    return _here


@contextmanager
def on(device: str) -> Iterator[torch.device]:
    """Make a device the one of the tests that run now.

    On a GPU, TF32 is switched off, since tests compare results closer than it rounds, and
    deterministic algorithms are switched on, since many tests compare bits.
    """
    global _here
    before = _here, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    _here = torch.device(device)
    if _here.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield _here
    finally:
        _here, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(was_deterministic)


def chosen(config: pytest.Config) -> tuple[str, ...]:
    """Return the devices that a run of the tests uses."""
    asked = config.getoption("device")
    if asked is None:
        return NAMES
    if asked not in NAMES:
        raise pytest.UsageError(f"--device {asked}: PyTorch sees {' and '.join(NAMES)} here")
    return (asked,)


def takes_device(item: pytest.Item) -> bool:
    """Return whether a test takes the fixture ``device``, not a parameter of this name."""
    if "device" not in getattr(item, "fixturenames", ()):
        return False
    own = (str(mark.args[0]) for mark in item.iter_markers("parametrize"))
    return not any("device" in re.findall(r"\w+", names) for names in own)
