"""The batches of one epoch, for trials that may be at different steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._random import seed_everything
from thrifty.pack.task._data import Batch


class ArrayFeed:
    """Batches by index into arrays on the device, for any step in any order."""

    def __init__(
        self, arrays: Sequence[torch.Tensor], order: torch.Tensor, batch_size: int
    ) -> None:
        self.arrays = arrays
        self._order = order
        self._batch_size = batch_size
        self._parts: tuple[torch.Tensor, ...] = order.split(batch_size)  # type: ignore[no-untyped-call]
        self.sizes = tuple(len(part) for part in self._parts)
        self.rows_at_most = max(self.sizes)
        self._row_shapes = tuple((tuple(array.shape[1:]), array.dtype) for array in arrays)

    def num_rows(self, step: int) -> int:
        """Return the number of rows in the batch of a step."""
        return self.sizes[step]

    def rest(self, step: int) -> torch.Tensor:
        """Return the row indices of this step and all later ones, in order."""
        return self._order[step * self._batch_size :]

    def index(self, step: int) -> torch.Tensor:
        """Return the row indices of the batch of a step."""
        return self._parts[step]

    def row_shapes(self, step: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape of a row and the dtype of each tensor."""
        return self._row_shapes

    def batch(self, step: int) -> list[torch.Tensor]:
        """Return the tensors of the batch of a step."""
        return [array[self._parts[step]] for array in self.arrays]


class IteratorFeed:
    """Batches from an iterator, one after the other."""

    sizes = ()  # unknown in advance

    def __init__(
        self, batches: Iterator[Batch], *, seeds: Callable[[int], int] | None = None
    ) -> None:
        self._seeds = seeds
        self._batches = batches
        self._step = -1
        self.rows_at_most = 0  # unknown in advance
        self._leaves: list[Any] = []

    def num_rows(self, step: int) -> int:
        """Return the number of rows in the batch of a step."""
        return len(self.batch(step)[0])

    def row_shapes(self, step: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape of a row and the dtype of each tensor."""
        return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in self.batch(step))

    def batch(self, step: int) -> list[torch.Tensor]:
        """Return the tensors of a batch; ask for steps in order, each any number of times."""
        while self._step < step:
            if self._seeds is not None:
                seed_everything(self._seeds(self._step + 1))
            self._leaves = pytree.tree_leaves(next(self._batches))
            self._step += 1
        return self._leaves


Feed = ArrayFeed | IteratorFeed
