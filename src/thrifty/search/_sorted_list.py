"""Sorted list that stays fast to update, however long it is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Generic, TypeVar, overload


Item = TypeVar("Item", bound=Any)

BLOCK = 512
"""Items of a block after a split; blocks are short, as an insertion moves all items after it."""


class SortedList(Generic[Item]):
    """Sorted list of items, in blocks of at most ``2 * BLOCK``.

    Adding, removing and ranking take time proportional to the number of blocks, not of items.

    >>> board = SortedList([3, 1])
    >>> board.add(2)
    >>> list(board), board.rank(3), board[1:]
    ([1, 2, 3], 2, [2, 3])
    """

    __slots__ = ("_blocks", "_lasts", "_len")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        ordered = sorted(items)
        self._len = len(ordered)
        self._blocks = [ordered[at : at + BLOCK] for at in range(0, len(ordered), BLOCK)]
        self._lasts = [block[-1] for block in self._blocks]

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._len)
            if step < 0:
                return list(self)[index]
            return list(islice(self.iterate(start), 0, max(stop - start, 0), step))
        at = index + self._len if index < 0 else index
        if at >= 0:
            for block in self._blocks:
                if at < len(block):
                    return block[at]
                at -= len(block)
        raise IndexError(f"index {index} of a list of {self._len}")

    def iterate(self, start: int) -> Iterator[Item]:
        """Return an iterator over the items from index ``start`` on."""
        for number, block in enumerate(self._blocks):
            if start < len(block):
                rest = islice(self._blocks, number + 1, None)
                return chain(islice(block, start, None), chain.from_iterable(rest))
            start -= len(block)
        return iter(())

    def add(self, item: Item) -> None:
        """Insert an item in its place."""
        self._len += 1
        lasts = self._lasts
        number = bisect_left(lasts, item)
        if number < len(lasts):
            block = self._blocks[number]
            insort(block, item)
        elif lasts:
            number -= 1
            block = self._blocks[number]
            block.append(item)
            lasts[number] = item
        else:
            block = [item]
            self._blocks.append(block)
            lasts.append(item)
        if len(block) > 2 * BLOCK:
            self._blocks[number : number + 1] = [block[:BLOCK], block[BLOCK:]]
            lasts[number : number + 1] = [block[BLOCK - 1], block[-1]]

    def remove(self, item: Item) -> None:
        """Remove an item that is in the list."""
        number = bisect_left(self._lasts, item)
        block = self._blocks[number]
        place = bisect_left(block, item)
        assert block[place] == item
        del block[place]
        self._len -= 1
        if block:
            self._lasts[number] = block[-1]
        else:
            del self._blocks[number], self._lasts[number]

    def rank(self, item: Item) -> int:
        """Return how many items are less than ``item``."""
        number = bisect_left(self._lasts, item)
        before = sum(map(len, self._blocks[:number]))
        if number == len(self._blocks):
            return before
        return before + bisect_left(self._blocks[number], item)
