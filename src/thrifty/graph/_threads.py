"""Threads: batches computed in advance, and kernels on ranges of rows."""

from __future__ import annotations

import atexit
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from thrifty.core import GraphError

from .kernels import wrapping


T = TypeVar("T")


class OrderedPrefetcher(Iterator[T], Generic[T]):
    """An iterator over ``make(0)``, ``make(1)``, ..., which threads compute ahead of the consumer.

    At most ``depth`` items are started and not yet taken. An exception of ``make`` is raised in
    its turn, with its traceback, and ends the iteration. The threads end after the last item, with
    ``close``, when the iterator is garbage-collected, and at the exit of the interpreter. Threads
    that wait always sleep.

    Args:
        make: function that several threads call at once.
        num: number of items.
        num_threads: number of threads, at least 1.
        depth: maximum number of items that are started and not yet taken, at least 1.

    >>> list(OrderedPrefetcher(lambda number: number * number, 4, num_threads=2, depth=3))
    [0, 1, 4, 9]
    """

    def __init__(self, make: Callable[[int], T], num: int, *, num_threads: int, depth: int) -> None:
        self._line: _Line[T] = _Line(make, num, num_threads=num_threads)
        self._num = num
        self._taken = 0
        self._early: dict[int, _PreparedBatch[T]] = {}
        self._turn = Lock()
        self._process = os.getpid()
        # Runs at garbage collection, because the threads hold the line and never this iterator.
        self._end = weakref.finalize(self, self._line.close)
        self._end.atexit = False
        for number in range(min(depth, num)):
            self._line.wanted.put(number)
        self._next_wanted = min(depth, num)
        self._line.start()
        if not num:
            self.close()

    def __iter__(self) -> OrderedPrefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._process != os.getpid():
            raise GraphError(
                "this iteration was begun before the process was forked, and its threads "
                "stayed in the parent; begin a new one"
            )
        # Callers may share an iterator: each item goes to one of them.
        with self._turn:
            return self._next()

    def _next(self) -> T:
        if not self._end.alive:
            raise StopIteration
        while self._taken not in self._early:
            made = self._line.made.get()
            self._early[made.number] = made
        made = self._early.pop(self._taken)
        if made.error is not None:
            self.close()
            try:
                raise made.error
            finally:
                # The traceback leads back here, a cycle that would keep everything until garbage
                # is collected.
                del made
        self._taken += 1
        if self._next_wanted < self._num:
            self._line.wanted.put(self._next_wanted)
            self._next_wanted += 1
        if self._taken == self._num:
            self.close()
        return made.value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the threads end after the items that they are making; hand over nothing more."""
        self._early.clear()
        self._end()


class _PreparedBatch(NamedTuple, Generic[T]):
    number: int
    value: T | None
    error: BaseException | None


class _Line(Generic[T]):
    """State that the threads share with the iterator.

    Unlike taking a lock, putting to a ``SimpleQueue`` is safe at any moment, also during garbage
    collection.
    """

    def __init__(self, make: Callable[[int], T], num: int, *, num_threads: int) -> None:
        self.make = make
        self.wanted: SimpleQueue[int | None] = SimpleQueue()
        self.made: SimpleQueue[_PreparedBatch[T]] = SimpleQueue()
        self.closed = False
        # Daemons, because Python would otherwise wait for the threads before it ends the
        # iterations that they wait for.
        self.threads = [
            Thread(target=_work, args=(self,), name=f"thrifty-batches-{n}", daemon=True)
            for n in range(min(num_threads, num))
        ]

    def start(self) -> None:
        _lines.add(self)
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.closed = True
        for _ in self.threads:
            self.wanted.put(None)


def _work(line: _Line[T]) -> None:
    while (number := line.wanted.get()) is not None and not line.closed:
        line.made.put(_made(line.make, number))


def _made(make: Callable[[int], T], number: int) -> _PreparedBatch[T]:
    try:
        return _PreparedBatch(number, make(number), None)
    except BaseException as error:  # noqa: BLE001 -- raised again where the batch is requested
        return _PreparedBatch(number, None, error)


_lines: weakref.WeakSet[_Line[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before Python shuts down.

    A thread that returned from C++ during the shutdown would end the process with an error.
    """
    lines = list(_lines)
    for line in lines:
        line.close()
    for line in lines:
        for thread in line.threads:
            if thread is not current_thread():
                thread.join()


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
