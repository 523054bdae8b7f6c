"""Epochs of a fixed number of batches, taken from passes over a loader one after another."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from thrifty.core import TaskError, derive_seed
from thrifty.pack import borrowed_streams
from thrifty.pack._state import seed_everything


class StepBatches:
    """The batches ``start`` to ``start + num_batches`` of endless passes over a loader.

    When the data end, the next pass begins. The order of a pass depends only on the seed and on the
    number of the pass, so an epoch that begins within a pass goes on where the last one ended.
    Batches before ``start`` are skipped without being read where the loader is a ``DataLoader``
    over a map-style data set; other loaders are read from their beginning.

    Args:
        loader: A ``DataLoader``, or any iterable of batches that can be read several times.
        seed: Seed of the order of all passes.
        epoch_seed: Seed of what the loader draws in this epoch besides the order.
        start: How many batches earlier epochs have taken.
        num_batches: Length of the epoch, in batches.

    Raises:
        TaskError: The loader is an iterator, which can be read only once, or has no batches.

    >>> list(StepBatches([1, 2, 3], seed=0, epoch_seed=0, start=4, num_batches=4))
    [2, 3, 1, 2]
    """

    def __init__(
        self, loader: Iterable[Any], *, seed: int, epoch_seed: int, start: int, num_batches: int
    ) -> None:
        if isinstance(loader, Iterator):
            raise TaskError(
                f"steps_per_epoch: the training data are a {type(loader).__name__}, which can be "
                "read only once, and a trial that is resumed has to read it again; give a "
                "DataLoader, or a list or class of your own that returns a new iterator each time"
            )
        self._loader = loader
        self._seed = seed
        self._epoch_seed = epoch_seed
        self._start = start
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return the length of the epoch, in batches."""
        return self._num_batches

    @property
    def dataset(self) -> Any:
        """The data set of the loader."""
        return self._loader.dataset  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches."""
        length = _length(self._loader)
        first, to_skip = divmod(self._start, length) if length else (0, self._start)
        is_indexed = isinstance(self._loader, DataLoader) and not _is_stream(self._loader)
        left = self._num_batches
        for number in count(first):
            batches, num_skipped = (self._indexed if is_indexed else self._read)(
                number, to_skip, left
            )
            to_skip -= num_skipped
            num_taken = 0
            for batch in batches:
                num_taken += 1
                yield batch
            left -= num_taken
            if not left:
                return
            if not num_taken + num_skipped:
                raise TaskError("steps_per_epoch: the training data have no batches")

    def _indexed(self, number: int, start: int, num: int) -> tuple[Iterator[Any], int]:
        """Return up to ``num`` batches of a pass, and how many before them were skipped.

        Their order is drawn before they are read.
        """
        loader: Any = self._loader
        seed = derive_seed(self._seed, "pass", number)
        by_batch = loader.batch_sampler is not None
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._loader, number, seed)
            places = iter(loader.batch_sampler if by_batch else loader.sampler)
            num_skipped = sum(1 for _ in islice(places, start))
            order = list(islice(places, num))
        # A DataLoader refuses to exchange its sampler, and not each subclass can be made again.
        part = copy.copy(loader)
        vars(part)["batch_sampler" if by_batch else "sampler"] = order
        vars(part)["persistent_workers"] = False
        vars(part)["_iterator"] = None
        reseed(part, derive_seed(self._epoch_seed, "pass", number))
        return iter(part), num_skipped

    def _read(self, number: int, start: int, num: int) -> tuple[Iterator[Any], int]:
        """Do the same for a loader that has to be read to skip batches."""
        batches = self._drawn(number)
        num_skipped = sum(1 for _ in islice(batches, start))
        return islice(batches, num), num_skipped

    def _drawn(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass; each is read with random streams of its own."""
        seed = derive_seed(self._seed, "pass", number)
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._loader, number, seed)
            batches = iter(self._loader)
        for place in count():
            with borrowed_streams():
                seed_everything(derive_seed(seed, "batch", place))
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


_END = object()


class PassSampler(Sampler[Any]):
    """A sampler whose order in a pass depends only on the seed and on the number of the pass.

    Args:
        sampler: The sampler, which may draw from a global stream.
        seed: Seed of the order of all passes.
        first: Number of the pass that is drawn first, unless ``set_epoch`` says another.

    >>> sampler = PassSampler(torch.utils.data.RandomSampler(range(100)), seed=0, first=1)
    >>> order = list(sampler)
    >>> sampler.set_epoch(1)
    >>> order == list(sampler), order == list(sampler)
    (True, False)
    """

    def __init__(self, sampler: Any, *, seed: int, first: int = 0) -> None:
        self._sampler = sampler
        self._seed = seed
        self._number = first

    def __len__(self) -> int:
        """Return the length of a pass."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the pass that is drawn next."""
        self._number = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the order of a pass, which is drawn as a whole."""
        seed = derive_seed(self._seed, "pass", self._number)
        with borrowed_streams():
            seed_everything(seed)
            begin_pass(self._sampler, self._number, seed)
            order = list(self._sampler)
        self._number += 1
        yield from order


def begin_pass(loader: Any, number: int, seed: int) -> None:
    """Reseed what a loader or a sampler brings along, and tell it which pass begins."""
    reseed(loader, seed)
    for each in (loader, *_samplers(loader)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)


def _length(loader: Any) -> int | None:
    """Return how many batches a pass has, None if only reading it shows that."""
    if not isinstance(loader, Sized) or _is_stream(loader):
        return None
    try:
        return len(loader)
    except TypeError:  # a sampler without end
        return None


def _is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _samplers(loader: Any) -> tuple[Any, ...]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )


def reseed(loaders: Any, seed: int) -> None:
    """Reseed the generators that loaders bring along.

    They would otherwise run on from epoch to epoch, and differ in a trial that is resumed.
    """
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for number, loader in enumerate(loaders):
            reseed(loader, derive_seed(seed, "loader", number))
        return
    for holder in (loaders, *_samplers(loaders)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
