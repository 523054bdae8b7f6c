"""Values computed in advance by threads, handed over in order."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

from ._errors import UsageError


T = TypeVar("T")


class OrderedPrefetcher(Iterator[T], Generic[T]):
    """An iterator over ``make(0)``, ``make(1)``, ..., which threads compute ahead of the consumer.

    At most ``depth`` items are started and not yet taken. An exception of ``make`` is raised in
    its turn, with its traceback, and ends the iteration. The threads end after the last item, with
    ``close``, when the iterator is garbage-collected, and at the exit of the interpreter. Threads
    that wait always sleep.

    Args:
        make: Function that several threads call at once.
        num: Number of items.
        num_threads: Number of threads, at least 1.
        depth: Maximum number of items that are started and not yet taken, at least 1.

    >>> list(OrderedPrefetcher(lambda number: number * number, 4, num_threads=2, depth=3))
    [0, 1, 4, 9]
    """

    def __init__(self, make: Callable[[int], T], num: int, *, num_threads: int, depth: int) -> None:
        self._pool: _ThreadPool[T] = _ThreadPool(make, num, num_threads=num_threads)
        self._num = num
        self._taken = 0
        self._early: dict[int, _PreparedBatch[T]] = {}
        self._turn = Lock()
        self._process = os.getpid()
        # Runs at garbage collection, because the threads hold the pool and never this iterator.
        self._end = weakref.finalize(self, self._pool.close)
        self._end.atexit = False
        for number in range(min(depth, num)):
            self._pool.wanted.put(number)
        self._next_wanted = min(depth, num)
        self._pool.start()
        if not num:
            self.close()

    def __iter__(self) -> OrderedPrefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._process != os.getpid():
            raise UsageError(
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
            made = self._pool.made.get()
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
            self._pool.wanted.put(self._next_wanted)
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


class _ThreadPool(Generic[T]):
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
        _pools.add(self)
        _threads.difference_update([thread for thread in list(_threads) if not thread.is_alive()])
        for thread in self.threads:
            thread.start()
            _threads.add(thread)

    def close(self) -> None:
        self.closed = True
        for _ in self.threads:
            self.wanted.put(None)


def _work(pool: _ThreadPool[T]) -> None:
    while (number := pool.wanted.get()) is not None and not pool.closed:
        pool.made.put(_made(pool.make, number))


def _made(make: Callable[[int], T], number: int) -> _PreparedBatch[T]:
    try:
        return _PreparedBatch(number, make(number), None)
    except BaseException as error:  # noqa: BLE001 -- raised again where the batch is requested
        return _PreparedBatch(number, None, error)


_pools: weakref.WeakSet[_ThreadPool[Any]] = weakref.WeakSet()
_threads: set[Thread] = set()
"""Started threads. One that has let go of its pool still has some steps to go, which must not be
left to the shutdown."""


@atexit.register
def _end_all() -> None:
    """End all threads before Python shuts down.

    A thread that returned from C++ during the shutdown would end the process with an error.
    """
    for pool in list(_pools):
        pool.close()
    for thread in list(_threads):
        if thread is not current_thread():
            thread.join()
