"""Compressed sparse rows, gathering of rows, and how kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from thrifty.core import MissingExtraError


try:
    import numba
    from numba.core import cgutils, types
    from numba.extending import intrinsic
except ImportError:
    raise MissingExtraError("numba", extra="graph") from None

import llvmlite.ir as ir


COMPILED: bool = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
"""Whether kernels are compiled.

False under ``NUMBA_DISABLE_JIT=1``: kernels are then plain Python, slow and easy to step through.
"""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that needs no Python objects.

    Other threads run while it does, and the compiled code is cached on disk between processes.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # There is no place for the cache: a system-wide installation and a user without a home.
        return numba.njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call in their inner loops."""
    return numba.njit(nogil=True, inline="always", error_model="numpy")(function)


def wrapping() -> AbstractContextManager[Any]:
    """Return a context for kernel calls in which unsigned numbers wrap around silently.

    Uncompiled kernels need it to behave like compiled ones.
    """
    return nullcontext() if COMPILED else np.errstate(over="ignore")


def _prefetch_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    address = builder.gep(array.data, [args[1]])
    byte = builder.bitcast(address, cgutils.voidptr_t)
    i32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
    name = "llvm.prefetch.p0" if cgutils.voidptr_t.is_opaque else "llvm.prefetch.p0i8"
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, name
    )
    # The flags mean: for reading, into all levels of the cache, data.
    builder.call(function, [byte, i32(0), i32(3), i32(1)])
    return context.get_dummy_value()


# The plain function comes first: a type checker takes the arguments from it.
if not COMPILED:

    def prefetch(array: np.ndarray, index: int) -> None:
        """Do nothing: Python would not gain from prefetching."""

else:

    @intrinsic
    def prefetch(_typing: Any, array: Any, index: Any) -> Any:
        """Fetch ``array[index]`` into the cache; any index is allowed and none is checked."""
        return types.void(array, index), _prefetch_code


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32, _11 = (np.uint64(n) for n in (30, 27, 31, 32, 11))
_SMALL = 1 << 16
_UNIT = 2.0**-53


@inlined
def mix(z: np.uint64) -> np.uint64:
    """Return the image of ``z`` under a bijection of 64-bit words that looks random."""
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@inlined
def stream(key: np.uint64, number: int) -> np.uint64:
    """Return the random state of one row; add ``GOLDEN`` before each number, and mix."""
    return mix(key + np.uint64(number) * GOLDEN)  # type: ignore[no-any-return]


@inlined
def below(word: np.uint64, bound: int) -> np.int64:
    """Return 0 to ``bound - 1``, each with the same probability to within ``2**-16`` of it."""
    if bound < _SMALL:
        return np.int64(((word >> _32) * np.uint64(bound)) >> _32)
    return np.int64(np.float64(word >> _11) * _UNIT * np.float64(bound))


AHEAD = 32
"""Edges between prefetch and use."""
KEEP, REMOVE, ADD = 0, 1, 2
"""What to do with edges from a node to itself."""


@kernel
def group(keys: np.ndarray, values: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Write ``values`` to ``out``, grouped by key, and the start of each key to ``starts``.

    ``starts`` are zeros, one more than there are keys. Values of one key stay in the order of their
    appearance.
    """
    _count(keys, starts)
    num = len(keys)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(starts, keys[e + AHEAD])
        at = starts[keys[e]]
        out[at] = values[e]
        starts[keys[e]] = at + 1
    _step_back(starts)


@kernel
def reverse(indptr: np.ndarray, indices: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Write the rows of the reversed edges, each in ascending order.

    ``starts`` are zeros, one more than there are nodes.
    """
    _count(indices, starts)
    num = len(indices)
    for row in range(len(indptr) - 1):
        for e in range(indptr[row], indptr[row + 1]):
            if e + AHEAD < num:
                prefetch(starts, indices[e + AHEAD])
            at = starts[indices[e]]
            out[at] = row
            starts[indices[e]] = at + 1
    _step_back(starts)


@kernel
def transpose(
    indptr: np.ndarray, indices: np.ndarray, starts: np.ndarray, rows: np.ndarray, edges: np.ndarray
) -> None:
    """Write the reversed edges as ``reverse`` does, and each edge's number to ``edges``."""
    _count(indices, starts)
    num = len(indices)
    for row in range(len(indptr) - 1):
        for e in range(indptr[row], indptr[row + 1]):
            if e + AHEAD < num:
                prefetch(starts, indices[e + AHEAD])
            at = starts[indices[e]]
            rows[at] = row
            edges[at] = e
            starts[indices[e]] = at + 1
    _step_back(starts)


@kernel
def unite_rows(
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    loops: int,
    starts: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the union of two sets of ascending rows, without duplicates.

    Args:
        first: ``(indptr, indices)`` of the first set.
        second: ``(indptr, indices)`` of the second set.
        loops: ``KEEP``, ``REMOVE`` or ``ADD``.
        starts: Receives where rows begin; entry 0 is 0.
        out: Receives the union; if it is empty, entries are only counted.
    """
    at = 0
    for row in range(len(starts) - 1):
        at = _unite_row(first, second, row, loops, at, out)
        starts[row + 1] = at


@inlined
def _unite_row(
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    row: int,
    loops: int,
    at: int,
    out: np.ndarray,
) -> int:
    """Write one row from ``at`` on, and return where it ends."""
    i, i_end = first[0][row], first[0][row + 1]
    j, j_end = second[0][row], second[0][row + 1]
    loop_is_due = loops == ADD
    last: int | np.int64 = -1
    while i < i_end or j < j_end or loop_is_due:
        from_first = i < i_end and (j >= j_end or first[1][i] <= second[1][j])
        if from_first:
            node: int | np.int64 = np.int64(first[1][i])
        elif j < j_end:
            node = np.int64(second[1][j])
        else:
            node = row
        if loop_is_due and row <= node:
            node = row
            loop_is_due = False
        elif from_first:
            i += 1
        else:
            j += 1
        if node != last and not (node == row and loops == REMOVE):
            if len(out):
                out[at] = node
            at += 1
        last = node
    return at


@inlined
def _count(keys: np.ndarray, starts: np.ndarray) -> None:
    """Write where each key begins to ``starts``, which are zeros before."""
    num = len(keys)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(starts, keys[e + AHEAD])
        starts[keys[e]] += 1
    total = 0
    for key in range(len(starts)):
        count = starts[key]
        starts[key] = total
        total += count


@inlined
def _step_back(starts: np.ndarray) -> None:
    """Undo the move of each start to where the next key begins."""
    for key in range(len(starts) - 1, 0, -1):
        starts[key] = starts[key - 1]
    starts[0] = 0


"""Edges between prefetch and use."""


@kernel
def read_neighbors(indices: np.ndarray, picks: np.ndarray, out: np.ndarray) -> None:
    """Write ``out[e] = indices[picks[e]]`` for all edges."""
    num = len(picks)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(indices, picks[np.uint64(e + AHEAD)])
        out[e] = indices[np.uint64(picks[e])]


LINE = 64
"""Bytes that one fetch loads."""
_LINES_AHEAD = 64
"""Cache lines between prefetch and use; by measurement, speed is flat from 32 to 128."""
_MOST_ROWS_AHEAD = 32


@inlined
def rows_ahead(features: np.ndarray) -> int:
    """Return the number of rows between prefetch and use: many narrow ones or few wide ones."""
    lines = 1 + features.shape[1] * features.itemsize // LINE
    return max(1, min(_MOST_ROWS_AHEAD, _LINES_AHEAD // lines))  # type: ignore[no-any-return]


@inlined
def fetch_row(features: np.ndarray, node: int, step: int) -> None:
    """Fetch all cache lines of a row; a line has ``step`` elements."""
    # An index instead of a second array: numba counts references to each array that is passed on,
    # which costs as much as a short row.
    at = np.int64(node) * features.shape[1]
    end = at + features.shape[1]
    # A while loop, because a range would divide by the non-constant step once for each row.
    while at < end:
        prefetch(features, at)
        at += step
    # Rows seldom begin at a cache line, so their end may lie in one more.
    prefetch(features, end - 1)


_HALF = np.uint32(16)
_SIGN, _MAGNITUDE = np.uint32(0x8000), np.uint32(0x7FFF)
_SHIFT = np.uint32(13)
"""Number of bits by which the fraction of a float32 is longer than that of a float16."""
_BIAS = np.uint32((127 - 15) << 23)
_FIRST_NORMAL, _INFINITE = np.uint32(1 << 23), np.uint32(31 << 23)
"""Exponents 1 and 31 of float16, at the position of float32's exponent."""
_SMALLEST = np.float32(2.0**-14)
_QUIET, _NOTHING = np.uint32(1 << 22), np.uint32(0)


@kernel
def gather_rows(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Copy ``features[nodes[i]]`` to ``out[i]``, bit by bit."""
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            out[i, f] = features[node, f]


@kernel
def gather_bfloat16(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Gather rows of raw bfloat16 (uint16) as raw float32 (uint32), whose upper half they are."""
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            out[i, f] = np.uint32(features[node, f]) << _HALF


@kernel
def gather_float16(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Gather rows of raw float16 (uint16) as raw float32 (uint32), in vector instructions.

    NaN comes out quiet, as from the processor's own conversion.
    """
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            half = np.uint32(features[node, f])
            bits = np.uint32((half & _MAGNITUDE) << _SHIFT)
            normal = np.uint32(bits + _BIAS)
            # For a subnormal number, add its fraction to that of 2**-14 and subtract 2**-14.
            lifted = np.uint32(normal + _FIRST_NORMAL).view(np.float32)
            small = np.float32(lifted - _SMALLEST).view(np.uint32)
            large = np.uint32(normal + _BIAS) | (_QUIET if bits > _INFINITE else _NOTHING)
            value = small if bits < _FIRST_NORMAL else (large if bits >= _INFINITE else normal)
            out[i, f] = value | np.uint32((half & _SIGN) << _HALF)
