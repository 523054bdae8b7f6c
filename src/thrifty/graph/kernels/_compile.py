"""How kernels are compiled, and their random numbers."""

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
