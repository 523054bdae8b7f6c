"""Threads that make things in advance, handed over in order."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

from thrifty.core import GraphError


T = TypeVar("T")


class InOrder(Iterator[T], Generic[T]):
    """``make(0)``, ``make(1)``, ... in order, made by threads ahead of whoever iterates.

    At most ``depth`` are begun and not yet taken. An exception of ``make`` is raised at its place, with its traceback, and ends the iteration. The threads end
    with the last number, with ``close``, when nobody holds the iterator any more, and at the exit of the interpreter. No thread ever
    waits otherwise than asleep.

    Args:
        make: called by several threads at once.
        num: how many there are.
        num_threads: at least 1.
        depth: at least 1.

    >>> list(InOrder(lambda number: number * number, 4, num_threads=2, depth=3))
    [0, 1, 4, 9]
    """

    def __init__(
        self, make: Callable[[int], T], num: int, *, num_threads: int, depth: int
    ) -> None:
        self._line: _Line[T] = _Line(make, num, num_threads=num_threads)
        self._num = num
        self._taken = 0
        self._early: dict[int, _Made[T]] = {}
        self._turn = Lock()
        self._process = os.getpid()
        # on garbage: the threads hold the line and never this iterator
        self._end = weakref.finalize(self, self._line.close)
        self._end.atexit = False
        for number in range(min(depth, num)):
            self._line.wanted.put(number)
        self._next_wanted = min(depth, num)
        self._line.start()
        if not num:
            self.close()

    def __iter__(self) -> InOrder[T]:
        return self

    def __next__(self) -> T:
        if self._process != os.getpid():
            raise GraphError(
                "this iteration was begun before the process was forked, and its threads stayed in the parent; begin a new one"
            )
        # for callers that share an iterator: each number goes to one of them
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
                # its traceback leads here: a cycle that would keep everything until garbage is collected
                del made
        self._taken += 1
        if self._next_wanted < self._num:
            self._line.wanted.put(self._next_wanted)
            self._next_wanted += 1
        if self._taken == self._num:
            self.close()
        return made.value  # type: ignore[return-value]

    def close(self) -> None:
        """Lets the threads end once they are through with what they are making; nothing more is handed over."""
        self._early.clear()
        self._end()


class _Made(NamedTuple, Generic[T]):
    number: int
    value: T | None
    error: BaseException | None


class _Line(Generic[T]):
    """What the threads share with the iterator. ``SimpleQueue`` may be put to at any moment, also while garbage is collected; a lock may not."""

    def __init__(self, make: Callable[[int], T], num: int, *, num_threads: int) -> None:
        self.make = make
        self.wanted: SimpleQueue[int | None] = SimpleQueue()
        self.made: SimpleQueue[_Made[T]] = SimpleQueue()
        self.closed = False
        # daemons: Python would otherwise wait for them before it ends the iterations that they wait for
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


def _made(make: Callable[[int], T], number: int) -> _Made[T]:
    try:
        return _Made(number, make(number), None)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is raised where the batch is wanted
        return _Made(number, None, error)


_lines: weakref.WeakSet[_Line[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Threads that come back from C++ while Python is being taken down would end the process with an error."""
    lines = list(_lines)
    for line in lines:
        line.close()
    for line in lines:
        for thread in line.threads:
            if thread is not current_thread():
                thread.join()
