"""Products of matrices by oneDNN, where it is faster and gives the same numbers to the last bit.

On x86, PyTorch multiplies matrices in single precision by MKL. On a processor of AMD, MKL leaves
half of each vector unit idle (AVX2 instead of AVX-512), and oneDNN, which PyTorch contains for
convolutions, is about twice as fast. Numbers in single precision depend on the order in which terms
are added. MKL adds blocks of terms; if oneDNN is given the same blocks, its results are the same
bits. Nothing relies on that: the first time that a program computes a product, it is computed in
both ways, and oneDNN computes it from then on only if the results are equal and it took less time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from thrifty.pack._frozen import readable

from ._record import Call, Program


aten: Any = torch.ops.aten

MIN_MULTIPLICATIONS = 8_000_000
"""Multiplications of a core from which it is worth the time to try oneDNN."""
MIN_SIZE = 16
"""Rows, terms and columns from which it is."""
MAX_RATIO = 0.95
"""The largest share of PyTorch's time that oneDNN may take."""
TERMS = 192
"""How many terms MKL adds in one go, to sums that it adds up then; found by comparing results."""
TILE = 512
"""Rows and columns of what oneDNN computes in one go, so that sums stay in a cache."""
TRIED_SIZE, TRIED_NUMBERS = 1024, 2**21
"""The most rows and columns of matrices with which both ways are tried, and their most numbers."""
TRIED_S, TRIED_TIMES = 0.03, 2
"""For how many seconds both are tried, and at least how often."""
COMPARED_ROWS = 64
"""The rows of the first result in a program that are compared."""

Way = Callable[..., Any]


def quick_product(call: Call, program: Program, *, device_type: str) -> Way | None:
    """Return a function for a call that computes its product by oneDNN where that is better.

    Args:
        call: The call.
        program: Its program.
        device_type: Where the program runs.

    Returns:
        The function. It takes the arguments of the call, and ``out``. None for other functions,
        small products, other types of numbers, and where oneDNN is switched off.
    """
    ways = _WAYS.get(call.function)
    if ways is None or device_type != "cpu" or not torch.backends.mkldnn.enabled:
        return None
    metas = [program.meta[number] for number in (*call.refs, *call.outputs)]
    if call.kwargs or len(call.refs) != len(call.args):
        return None
    if any(dtype != torch.float32 for *_, dtype in metas):
        return None
    (*_, rows, terms), left, _ = metas[-3]
    (*_, columns), right, _ = metas[-2]
    multiplications = rows * terms * columns / torch.get_num_threads()
    if min(rows, terms, columns) < MIN_SIZE or multiplications < MIN_MULTIPLICATIONS:
        return None
    if not (_is_plain((rows, terms), left) and _is_plain((terms, columns), right)):
        return None
    is_batched = call.function in _BATCHED
    if call.function in _BIASED and not _is_one_row(*metas[0][:2], columns, is_batched=is_batched):
        return None
    most = max(COMPARED_ROWS, min(TRIED_SIZE, TRIED_NUMBERS // terms))
    shape = _Shape(
        function=call.function,
        rows=min(rows, most),
        terms=terms,
        columns=min(columns, most),
        is_left_transposed=left[-1] != 1,
        is_right_transposed=right[-1] != 1,
    )
    return _Product(shape)


def _is_plain(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a matrix, or each of several, lies in memory by rows or by columns."""
    (rows, columns), (down, right) = shape, stride[-2:]
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _is_one_row(
    shape: Sequence[int], stride: Sequence[int], columns: int, *, is_batched: bool
) -> bool:
    """Return whether a bias is one row for each matrix, or one for all of them, without gaps."""
    if is_batched and (len(shape) != 3 or shape[1] != 1):
        return False
    rank = 3 if is_batched else 1
    return len(shape) == rank and shape[-1] == columns and stride[-1] == 1


# -- which way -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A function, and sizes and layouts of two matrices that it multiplies.

    Attributes:
        function: The function of PyTorch.
        rows: Rows of the first.
        terms: Its columns, and the rows of the second.
        columns: Columns of the second.
        is_left_transposed: Whether the first lies in memory by columns.
        is_right_transposed: Whether the second does.
    """

    function: Any
    rows: int
    terms: int
    columns: int
    is_left_transposed: bool
    is_right_transposed: bool

    def arguments(self) -> list[torch.Tensor]:
        """Return random arguments: a bias, if there is one, and two matrices, or two of each."""
        generator = torch.Generator().manual_seed(0)
        size = (2,) if self.function in _BATCHED else ()

        def matrix(rows: int, columns: int, *, transposed: bool) -> torch.Tensor:
            shape = (*size, columns, rows) if transposed else (*size, rows, columns)
            out = torch.randn(shape, generator=generator)
            return out.mT if transposed else out

        x = matrix(self.rows, self.terms, transposed=self.is_left_transposed)
        y = matrix(self.terms, self.columns, transposed=self.is_right_transposed)
        if self.function not in _BIASED:
            return [x, y]
        bias = matrix(1, self.columns, transposed=False)
        return [bias if size else bias[0], x, y]


class _Product:
    """A product that decides which way to take when it is computed first.

    It decides then, and not when a program is bound, and again if the number of threads is another
    one, since results may depend on that.
    """

    __slots__ = ("_is_by_onednn", "_onednn", "_pytorch", "_shape", "_threads")

    def __init__(self, shape: _Shape) -> None:
        self._pytorch, self._onednn = _WAYS[shape.function]
        self._shape = shape
        self._threads = 0
        self._is_by_onednn = False

    def __call__(self, *args: torch.Tensor, out: torch.Tensor) -> None:
        threads = torch.get_num_threads()
        if threads == self._threads and self._is_by_onednn:
            self._onednn(*args, out=out)
            return
        self._pytorch(*args, out=out)
        if threads != self._threads:
            self._threads = threads
            self._is_by_onednn = is_better(self._shape, threads=threads) and self._is_same(
                args, out
            )

    def _is_same(self, args: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
        """Return whether oneDNN finds the same last rows as PyTorch did."""
        *bias, x, y = args
        found = torch.empty_like(out[..., -COMPARED_ROWS:, :])
        try:
            self._onednn(*bias, x[..., -COMPARED_ROWS:, :], y, out=found)
        except RuntimeError:  # a layout that oneDNN does not take
            return False
        return torch.equal(found, out[..., -COMPARED_ROWS:, :])


@cache
def is_better(shape: _Shape, *, threads: int) -> bool:  # noqa: ARG001
    """Return whether oneDNN finds the same product of random matrices, and takes less time.

    Args:
        shape: The function, and sizes and layouts of the matrices.
        threads: Number of threads that compute it.
    """
    args = shape.arguments()
    ways = _WAYS[shape.function]
    results = [torch.empty(*args[-2].shape[:-1], shape.columns) for _ in ways]
    seconds = [math.inf, math.inf]
    try:
        end = time.perf_counter() + TRIED_S
        times = 0
        while times < TRIED_TIMES or time.perf_counter() < end:
            for place, way in enumerate(ways):
                start = time.perf_counter()
                way(*args, out=results[place])
                seconds[place] = min(seconds[place], time.perf_counter() - start)
            times += 1
    except (AttributeError, RuntimeError):  # a build of PyTorch without oneDNN, or another version
        return False
    return torch.equal(*results) and seconds[1] <= MAX_RATIO * seconds[0]


# -- products by oneDNN --------------------------------------------------------------------


def _mm(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    _multiply(x, y, None, out)


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    _multiply(x, y, bias, out)


def _bmm(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    for each in zip(x, y, out, strict=True):
        _multiply(each[0], each[1], None, each[2])


def _baddbmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
    biases = bias.flatten(0, 1).expand(len(out), -1)
    for b, *each in zip(biases, x, y, out, strict=True):
        _multiply(each[0], each[1], b, each[2])


_WAYS: dict[Any, tuple[Way, Way]] = {
    aten.mm.default: (torch.mm, _mm),
    aten.addmm.default: (torch.addmm, _addmm),
    aten.bmm.default: (torch.bmm, _bmm),
    aten.baddbmm.default: (torch.baddbmm, _baddbmm),
}
"""Functions of PyTorch, and the same by oneDNN."""
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
_BIASED = (aten.addmm.default, aten.baddbmm.default)


def _multiply(
    x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute ``x @ y + bias``, tile by tile."""
    x, y = readable(x), readable(y)
    # oneDNN takes numbers that lie side by side, wherever those of the bias are
    bias = None if bias is None else readable(bias).contiguous()
    for rows in _parts(x.shape[0], TILE):
        for columns in _parts(y.shape[1], TILE):
            shift = None if bias is None else bias[columns]
            out[rows, columns].copy_(_tile(x[rows], y[:, columns], shift))


def _tile(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ y + bias``, a block of terms after the other."""
    linear = torch.ops.mkldnn._linear_pointwise
    out: torch.Tensor | None = None
    for terms in _parts(x.shape[1], _block_of_terms(x.shape[1])):
        weight = _dense(y[terms]).t()
        if out is None:
            out = linear.default(x[:, terms], weight, bias, "none", [], "")
        else:
            out = linear.binary(x[:, terms], out, weight, None, "add")
    assert out is not None
    return out


def _block_of_terms(num: int) -> int:
    """Return how many of ``num`` terms MKL adds in one go.

    >>> [_block_of_terms(num) for num in (100, 192, 300, 383, 384, 4096)]
    [100, 192, 150, 191, 192, 192]
    """
    return num if num <= TERMS else min(TERMS, num // 2)


def _dense(y: torch.Tensor) -> torch.Tensor:
    """Return a matrix without gaps in memory; with gaps, oneDNN takes a thousand times as long."""
    return y.contiguous() if y.stride(1) == 1 else y.t().contiguous().t()


@cache
def _parts(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]
