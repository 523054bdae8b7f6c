"""Kernels on ranges of rows, in threads."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .kernels import wrapping


LEAST_WORK = 2**17
"""Number of elements to add up below which a second thread does not pay."""

_pool: ThreadPoolExecutor | None = None


def by_rows(kernel: Callable[..., None], indptr: np.ndarray, *arrays: Any, width: int) -> None:
    """Call ``kernel(indptr, *arrays, begin, end)`` for ranges of rows in parallel.

    The ranges have equally many edges and run in up to ``torch.get_num_threads()`` threads. Each
    row is written by one thread, so the result does not depend on the number of threads.

    Args:
        kernel: a compiled function that releases the GIL.
        indptr: where rows of edges begin and end.
        arrays: the kernel's other arguments.
        width: cost of an edge in elements.
    """
    num_rows = len(indptr) - 1
    total = int(indptr[-1]) + num_rows
    num = _num_threads(total * width)
    # Each row is written, which costs about as much as one edge.
    cuts = (
        bisect_left(range(num_rows), total * n // num, key=lambda i: int(indptr[i]) + i)
        for n in range(1, num)
    )
    _run(partial(kernel, indptr, *arrays), [0, *cuts, num_rows])


def by_elements(kernel: Callable[..., None], *arrays: Any, num: int) -> None:
    """Call ``kernel(*arrays, begin, end)`` for equal ranges of ``num`` elements in parallel.

    All ranges begin at even elements.
    """
    parts = _num_threads(num)
    _run(partial(kernel, *arrays), [*(num * n // parts // 2 * 2 for n in range(parts)), num])


def _num_threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // LEAST_WORK)


def _run(task: Callable[[int, int], None], cuts: Sequence[int]) -> None:
    """Run the first range in this thread and the others in the pool."""
    first, *others = pairwise(cuts)
    pending: list[Future[None]] = [_threads().submit(task, *cut) for cut in others]
    with wrapping():
        task(*first)
    for future in pending:
        future.result()


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(
            os.cpu_count(), thread_name_prefix="thrifty-rows", initializer=_wrap_around
        )
    return _pool


def _wrap_around() -> None:
    # NumPy keeps this setting per thread; it only matters to uncompiled kernels.
    wrapping().__enter__()


def _forget() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: a child that waited for them would wait forever.
    os.register_at_fork(after_in_child=_forget)
