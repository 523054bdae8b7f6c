"""ReLU and dropout in one pass."""

from __future__ import annotations

import numpy as np

from ._compile import kernel
from ._random import GOLDEN, mix


_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@kernel
def relu_dropout(
    x: np.ndarray,
    key: np.uint64,
    dropped: np.uint64,
    scale: float,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write the elements from ``begin`` to ``end``, each even or the end of the array.

    NaN stays NaN unless it is dropped.

    Args:
        x: flat; may be ``out``.
        key: key of the draws; element ``i`` uses half of word ``i // 2``.
        dropped: how many of ``2**32`` draws set an element to zero.
        scale: factor of the kept elements.
        out: flat.
        begin: first element.
        end: one after the last element.
    """
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    for n in range(begin // 2, end // 2):
        word = mix(key + np.uint64(n) * GOLDEN)
        i = 2 * n
        first, second = x[i] * factor, x[i + 1] * factor
        out[i] = zero if (first <= 0) | (word & _LOW < dropped) else first
        out[i + 1] = zero if (second <= 0) | (word >> _32 < dropped) else second
    if end % 2 == 1:
        word = mix(key + np.uint64(end // 2) * GOLDEN)
        last = x[end - 1] * factor
        out[end - 1] = zero if (last <= 0) | (word & _LOW < dropped) else last


@kernel
def relu_dropout_back(
    y: np.ndarray, grad: np.ndarray, scale: float, out: np.ndarray, begin: int, end: int
) -> None:
    """Write the gradient of the input, given the output ``y`` and its gradient.

    The gradient passes where an element was kept.
    """
    factor, zero = grad.dtype.type(scale), grad.dtype.type(0)
    for i in range(begin, end):
        # Read before knowing whether it is needed: a choice between two numbers needs no branch.
        passed = grad[i] * factor
        out[i] = zero if y[i] <= 0 else passed
