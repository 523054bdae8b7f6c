"""Compilation of kernels: one place for numba and its options."""

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


COMPILED = not numba.config.DISABLE_JIT
"""Whether kernels are compiled.

False under ``NUMBA_DISABLE_JIT=1``: kernels are then plain Python, slow and easy to step through.
"""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that needs no Python objects.

    Other threads run while it does, and the compiled code is cached on disk between processes.
    """
    options = {"nogil": True, "error_model": "numpy"}
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
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    # The flags mean: for reading, into all levels of the cache, data.
    builder.call(function, [byte, i32(0), i32(3), i32(1)])
    return context.get_dummy_value()


if COMPILED:

    @intrinsic
    def prefetch(_typing: Any, array: Any, index: Any) -> Any:
        """Fetch ``array[index]`` into the cache; any index is allowed and none is checked."""
        return types.void(array, index), _prefetch_code

else:

    def prefetch(array: np.ndarray, index: int) -> None:
        """Do nothing: Python would not gain from prefetching."""
