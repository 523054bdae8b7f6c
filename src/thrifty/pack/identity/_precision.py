"""How precisely PyTorch computes with single-precision numbers.

It has two interfaces for that. After code has used the one of PyTorch 2.9 (``fp32_precision``), the
older one raises an error where the two cannot say the same.
"""

from __future__ import annotations

from typing import Any

import torch


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
