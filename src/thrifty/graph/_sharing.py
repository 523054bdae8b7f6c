"""Batches that several trials share, as long as none of them changes one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from thrifty.core import plain_logger
from thrifty.pack.task._data import LastingError

from ._batch import Batch


logger = plain_logger(__name__)

_EVERY = 100
"""Reused batches between two comparisons with a newly made batch, on average."""


@dataclass(slots=True)
class Entry:
    """A batch that may be handed out several times.

    Attributes:
        batch: the batch as it was made, unless a trial has changed it.
        remake: makes the batch again.
        versions: version counters of its arrays when it was handed out; None if it was not.
    """

    batch: Batch
    remake: Callable[[], Batch]
    versions: tuple[int, ...] | None = None


class Sharing:
    """A distributor of batches, and of copies of them once a trial has changed one.

    A change in place shows in the version counters of PyTorch. Some changes are not counted there
    (``x.data``, ``x.numpy()``), so values are compared with those of a newly made batch, the first
    time and at random times.

    Attributes:
        copies: whether each trial gets its own copy.
    """

    def __init__(self) -> None:
        self.copies = False
        self._rng = random.Random(0)
        self._left = 0

    def hand(self, entry: Entry) -> Batch:
        """Return the batch as it was made, either itself or a copy."""
        if entry.versions is None and not self.copies:
            entry.versions = _versions(entry.batch)
            return entry.batch
        if not self.copies and self._is_intact(entry):
            return entry.batch
        if entry.versions is not None:
            entry.batch, entry.versions = entry.remake(), None
        return entry.batch.clone()

    def _is_intact(self, entry: Entry) -> bool:
        intact = entry.versions == _versions(entry.batch)
        if intact and self._left:
            self._left -= 1
            return True
        self._left = self._rng.randrange(1, 2 * _EVERY)
        intact = intact and _equal(entry.batch, entry.remake())
        if not intact:
            self.copies = True
            logger.warning(
                "a trial has changed a batch in place, which others see, too: from now on each "
                "trial gets a copy of each batch, which takes time; change a copy in the model "
                "(`batch.x.clone()`)"
            )
        return intact


class SharedEpoch(Iterator[Batch]):
    """An iterator over the batches of an epoch, whose copies advance on their own.

    ``itertools.tee`` makes such copies. A batch is kept until all copies have had it.

    Args:
        batches: batches of the epoch, each made once.
        remake: makes the batch at an index again.
        sharing: hands out the batches.
    """

    def __init__(
        self, batches: Iterator[Batch], *, remake: Callable[[int], Batch], sharing: Sharing
    ) -> None:
        self._batches = batches if isinstance(batches, LastingError) else LastingError(batches)
        self._remake = remake
        self._sharing = sharing
        self._index = 0
        self._next = _Link()

    def __copy__(self) -> SharedEpoch:
        other = SharedEpoch(self._batches, remake=self._remake, sharing=self._sharing)
        other._index, other._next = self._index, self._next
        return other

    def __next__(self) -> Batch:
        link, index = self._next, self._index
        if link.entry is None:
            link.entry = Entry(next(self._batches), lambda: self._remake(index))
            link.after = _Link()
        assert link.after is not None
        self._next, self._index = link.after, index + 1
        return self._sharing.hand(link.entry)


@dataclass(slots=True, eq=False)
class _Link:
    """A batch, once an iterator has requested it, and the link to the next one."""

    entry: Entry | None = None
    after: _Link | None = None


def _arrays(batch: Batch) -> list[torch.Tensor]:
    own = [batch.nodes, batch.seed_rows, *(a for a in (batch.x, batch.y) if a is not None)]
    return own + [a for block in batch.blocks for a in (block.indptr, block.indices)]


def _versions(batch: Batch) -> tuple[int, ...]:
    # Inference tensors have no version counter, but are still compared at random times.
    return tuple(0 if each.is_inference() else each._version for each in _arrays(batch))


def _equal(one: Batch, other: Batch) -> bool:
    pairs = zip(_arrays(one), _arrays(other), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in pairs
    )
