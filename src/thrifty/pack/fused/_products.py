"""Products of matrices by oneDNN, where it computes them faster than the library behind PyTorch.

On x86, PyTorch multiplies matrices in single precision by MKL. On a processor of AMD, MKL does not
use the widest vectors (AVX-512), and oneDNN, which PyTorch contains for convolutions, is more than
twice as fast (Zen 5: 230 beside 100 GFLOP/s on a core). Large products of programs go there if a
short measurement on this machine says so. Both libraries compute in single precision; sums are
rounded in another order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from thrifty.pack._frozen import readable

from ._record import Call, Program


aten: Any = torch.ops.aten

MIN_MULTIPLICATIONS = 4_000_000
"""Multiplications of a core from which a product goes to oneDNN, which begins one more slowly."""
MIN_SIZE = 4
"""Size of matrices from which it does; products of vectors take the time of reading them."""
MIN_RATIO = 1.3
"""How many times as fast oneDNN must be.

The choice has to be the same in each process on a machine, since it decides how results are
rounded. Measured ratios are near 1 or above 2.
"""
MEASURED_SIZE, MEASURED_TIMES = 384, 7
"""Size of the measured product of two squares, and how often it is computed in either way."""

Product = Callable[..., Any]


def quick_product(call: Call, program: Program, *, device_type: str) -> Product | None:
    """Return a function that computes a call's product by oneDNN into ``out``.

    Args:
        call: The call.
        program: Its program.
        device_type: Where the program runs.

    Returns:
        The function, which takes the arguments of the call; None where PyTorch's own one is to be
        called: for other functions, small products, other types of numbers, and on machines where
        oneDNN is not much faster.
    """
    found = _PRODUCTS.get(call.function)
    if found is None or device_type != "cpu" or call.kwargs:
        return None
    product, num_dims = found
    metas = [program.meta[number] for number in (*call.refs, *call.outputs)]
    if len(call.refs) != len(call.args) or any(dtype != torch.float32 for *_, dtype in metas):
        return None
    (*_, rows, terms), stride, _ = metas[-3]
    (*_, columns), other_stride, _ = metas[-2]
    multiplications = rows * terms * columns / torch.get_num_threads()
    if min(rows, terms, columns) < MIN_SIZE or multiplications < MIN_MULTIPLICATIONS:
        return None
    if not (_is_plain((rows, terms), stride) and _is_plain((terms, columns), other_stride)):
        return None
    if num_dims is not None:
        shape = metas[0][0]
        if len(shape) != num_dims or shape[-1] != columns or math.prod(shape[1:-1]) != 1:
            return None
    return product if torch.backends.mkldnn.enabled and is_quicker() else None


def _is_plain(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a matrix, or each of several, lies in memory by rows or by columns."""
    (rows, columns), (down, right) = shape, stride[-2:]
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


@cache
def is_quicker() -> bool:
    """Return whether oneDNN multiplies matrices much faster here; it is measured once."""
    try:
        seconds = _measured()
    except (AttributeError, RuntimeError):  # a build of PyTorch without oneDNN, or another version
        return False
    return seconds[0] >= MIN_RATIO * seconds[1]


def _measured() -> list[float]:
    """Return the seconds of a product by PyTorch and by oneDNN, the shortest of several times."""
    size = MEASURED_SIZE
    x, out = torch.full((size, size), 0.5), torch.empty(size, size)
    ways: list[Product] = [torch.mm, _mm]
    seconds = [math.inf] * len(ways)
    for _ in range(MEASURED_TIMES):
        for place, way in enumerate(ways):
            start = time.perf_counter()
            way(x, x, out=out)
            seconds[place] = min(seconds[place], time.perf_counter() - start)
    return seconds


def _product(
    x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute ``x @ y + bias``."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    shift = None if bias is None else readable(bias)
    out.copy_(linear(readable(x), readable(y).t(), shift, "none", [], ""))


def _mm(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    _product(x, y, None, out)


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    _product(x, y, bias, out)


def _bmm(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    for each in zip(x, y, out, strict=True):
        _product(each[0], each[1], None, each[2])


def _baddbmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    biases = bias.flatten(0, 1).expand(len(out), -1)
    for b, *each in zip(biases, x, y, out, strict=True):
        _product(each[0], each[1], b, each[2])


_PRODUCTS: dict[Any, tuple[Product, int | None]] = {
    aten.mm.default: (_mm, None),
    aten.addmm.default: (_addmm, 1),
    aten.bmm.default: (_bmm, None),
    aten.baddbmm.default: (_baddbmm, 3),
}
"""Products by oneDNN, and the number of dimensions that a bias must have."""
