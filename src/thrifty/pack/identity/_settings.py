"""Settings of the process that change results: dtype, device, precisions, determinism, folder.

PyTorch has two interfaces for how precisely it computes with single-precision numbers. After code
has used the one of PyTorch 2.9 (``fp32_precision``), the older one raises an error where the two
cannot say the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ._place import MISSING, Place


_PARTS = (
    "", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn",
    "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn",
)  # fmt: skip
"""The parts of ``torch.backends`` with a precision of their own."""
_LEFT_OUT = frozenset({"cuda.matmul", "mkldnn.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"})

Precisions = tuple[tuple[str, str], ...]
"""Names of parts, and their precisions."""


def matmul_precision() -> str | Precisions:
    """Return the precision of products of matrices; where it has no name, that of all parts.

    >>> matmul_precision()
    'highest'
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return all_precisions()


def set_matmul_precision(value: str | Precisions) -> None:
    """Set what ``matmul_precision`` has returned."""
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
        return
    for name, precision in value:
        part = _part(name)
        if part.fp32_precision != precision:
            part.fp32_precision = precision


def unusual_precisions() -> Precisions:
    """Return the parts whose precision is not that of PyTorch, besides products of matrices.

    Those of cuDNN are left out, as its other settings are: scripts for CPUs set them, too.

    >>> unusual_precisions()
    ()
    """
    found = all_precisions()
    return tuple(
        (name, value) for name, value in found if value != "none" and name not in _LEFT_OUT
    )


def all_precisions() -> Precisions:
    """Return the precision of each part that has one: none before PyTorch 2.9."""
    found = ((name, getattr(_part(name), "fp32_precision", None)) for name in _PARTS)
    return tuple((name, value) for name, value in found if value is not None)


def allows_tf32(name: str) -> bool:
    """Return whether a part rounds single-precision numbers to TF32.

    Args:
        name: ``"cuda.matmul"`` or ``"cudnn.conv"``.
    """
    value = getattr(_part(name), "fp32_precision", None)
    if value is None:  # before PyTorch 2.9
        part = _part(name.removesuffix(".conv"))
        return bool(part.allow_tf32)
    if value == "none":
        value = getattr(torch.backends, "fp32_precision", "none")
    return bool(value == "tf32")


def _part(name: str) -> Any:
    part: Any = torch.backends
    for each in name.split(".") if name else ():
        part = getattr(part, each, None)
    return part


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Settings:
    """Settings by the name of the function that reads them, read and written like places.

    >>> SETTINGS.get("torch.get_default_dtype()")
    torch.float32
    """

    def __init__(self) -> None:
        self._known = {
            "torch.get_default_dtype()": _Setting(torch.get_default_dtype, torch.set_default_dtype),
            "torch.get_default_device()": _Setting(
                torch.get_default_device, torch.set_default_device
            ),
            "torch.get_float32_matmul_precision()": _Setting(
                matmul_precision, set_matmul_precision
            ),
            "torch.are_deterministic_algorithms_enabled()": _Setting(
                torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
            ),
            "os.getcwd()": _Setting(_folder, _go_to),
        }

    def get(self, name: str, default: Any = MISSING) -> Any:
        """Return the value of a setting."""
        known = self._known.get(name)
        return default if known is None else known.read()

    def __setitem__(self, name: str, value: Any) -> None:
        setting = self._known[name]
        # write only a change: some settings have a cost, such as a default device for each call
        if setting.read() != value:
            setting.write(value)

    def places(self) -> Iterator[Place]:
        """Yield a place for each setting."""
        for name in self._known:
            yield Place(name=name, kind="item", holder=self, key=name)


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return None


def _go_to(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


SETTINGS = Settings()
