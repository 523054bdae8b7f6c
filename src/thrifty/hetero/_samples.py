"""The samples of each step: which they are, which worker trains them, and how they are read.

Batches are read from data sets by index.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from thrifty.core import HeteroError, derive_seed
from thrifty.pack import borrowed_streams, epoch_order
from thrifty.pack.task._own_generators import OwnGenerators


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples of one worker in one step.

    Attributes:
        public: Indices into the public data.
        private: Indices into the worker's private data.
    """

    public: tuple[int, ...]
    private: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.public) + len(self.private)

    def parts(self, most: int | None) -> tuple[Share, ...]:
        """Return the share in equal parts of at most ``most`` samples; None: in one part.

        >>> [len(part) for part in Share(public=tuple(range(5)), private=(0, 1)).parts(3)]
        [3, 2, 2]
        """
        num = -(-len(self) // most) if most else 1
        if num <= 1:
            return (self,)
        # Private samples come first in a batch.
        at, end = divmod(len(self), num)
        ends = [at * part + min(part, end) for part in range(num + 1)]
        own = len(self.private)
        return tuple(
            Share(
                public=self.public[max(0, low - own) : max(0, high - own)],
                private=self.private[low:high],
            )
            for low, high in pairwise(ends)
        )


@dataclass(slots=True, kw_only=True)
class Place:
    """Position in the data: all that a sample order needs to resume.

    Attributes:
        epoch: Epoch, from 0.
        public: Public samples that this epoch has used.
        private: Private samples that each worker has used, by name.
    """

    epoch: int = 0
    public: int = 0
    private: dict[str, int] = field(default_factory=dict)


class SampleOrder:
    """Visits each sample once per epoch, independent of which worker trains it.

    The public data are one permutation per epoch, which depends only on seed and epoch. A step
    takes the next positions of it, and the split only decides which worker takes which. Private
    samples are used on the worker that holds them, evenly over the epoch's steps, and public
    samples fill up the worker's share (Stannis). A worker with more private samples than its share
    trains the rest at the end, in additional steps. With ``subsample`` it trains a different part
    of them each epoch instead.

    Args:
        num_public: Samples that every worker can read.
        seed: Seed of the study.
        private: Number of samples that only one worker can read, by its name. A worker not listed
            has none.
        subsample: Leave out private samples beyond a worker's share of the epoch.

    Raises:
        HeteroError: There are no samples, or a number is negative.

    >>> order = SampleOrder(6, seed=0)
    >>> [len(share) for share in order.shares(Place(), (3, 1), ("a", "b"))]
    [3, 1]
    """

    def __init__(
        self,
        num_public: int,
        *,
        seed: int,
        private: Mapping[str, int] | None = None,
        subsample: bool = False,
    ) -> None:
        self.num_public = num_public
        self.private = {name: num for name, num in (private or {}).items() if num}
        self._seed = seed
        self._subsample = subsample
        if num_public < 0 or any(num < 0 for num in self.private.values()):
            raise HeteroError("numbers of samples are not negative")
        if not num_public and not self.private:
            raise HeteroError("there are no samples to train on")
        self._known: dict[tuple[str, int], torch.Tensor] = {}

    def left(self, place: Place, split: Sequence[int], names: Sequence[str]) -> int:
        """Return how many samples the present workers still have to train in this epoch."""
        return self.num_public - place.public + sum(self.own_left(place, split, names))

    def shares(
        self,
        place: Place,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        own_left: Sequence[int] | None = None,
    ) -> tuple[Share, ...]:
        """Return the samples of each worker in the next step.

        Args:
            place: Position in the data.
            sizes: Samples per worker; workers get fewer where too few are left.
            names: Names of the workers, by rank.
            own_left: Private samples that each worker has still to train. Pass it where ``sizes``
                are not those of a whole step.
        """
        if own_left is None:
            own_left = self.own_left(place, sizes, names)
        own, public = self._sizes(place, sizes, own_left)
        shuffled = self._public(place.epoch)
        shares, begin = [], place.public
        for name, num_own, num_public in zip(names, own, public, strict=True):
            used = place.private.get(name, 0)
            of_own: tuple[int, ...] = ()
            if num_own:
                mine = self._private(name, place.epoch)
                of_own = tuple(mine[used : used + num_own].tolist())
            of_public = tuple(shuffled[begin : begin + num_public].tolist())
            shares.append(Share(public=of_public, private=of_own))
            begin += num_public
        return tuple(shares)

    def advance(self, place: Place, shares: Sequence[Share], names: Sequence[str]) -> None:
        """Record that these shares were trained."""
        place.public += sum(len(share.public) for share in shares)
        for name, share in zip(names, shares, strict=True):
            if share.private:
                place.private[name] = place.private.get(name, 0) + len(share.private)

    def own_left(self, place: Place, split: Sequence[int], names: Sequence[str]) -> list[int]:
        """Return the private samples that each worker still has to train in this epoch.

        ``split`` is the split of a whole step.
        """
        total = self.num_public + sum(self.private.get(name, 0) for name in names)
        out = []
        for name, size in zip(names, split, strict=True):
            num = self.private.get(name, 0)
            if self._subsample and num:
                num = min(num, math.ceil(total * size / max(1, sum(split))))
            out.append(max(0, num - place.private.get(name, 0)))
        return out

    def _sizes(
        self, place: Place, split: Sequence[int], own_left: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return private and public samples of each worker; public ones end where the data end."""
        public_left = self.num_public - place.public
        steps = max(1, math.ceil((public_left + sum(own_left)) / max(1, sum(split))))
        own = [
            min(size, num, math.ceil(num / steps))
            for size, num in zip(split, own_left, strict=True)
        ]
        public = [size - num for size, num in zip(split, own, strict=True)]
        for worker in sorted(range(len(split)), key=lambda worker: own[worker] - own_left[worker]):
            # Where the public data end, workers with private samples left use more of those.
            short = sum(public) - public_left
            if short <= 0:
                break
            more = min(short, own_left[worker] - own[worker], public[worker])
            own[worker] += more
            public[worker] -= more
        return own, public

    def _public(self, epoch: int) -> torch.Tensor:
        """Return the epoch's order, as ``thrifty.pack`` orders the data of a task.

        A job of several workers is thus the same trial as a job of one process.
        """
        return self._remember(
            "public", epoch, lambda: epoch_order(self.num_public, seed=self._seed, epoch=epoch)
        )

    def _private(self, name: str, epoch: int) -> torch.Tensor:
        seed = derive_seed(self._seed, "private", name)
        return self._remember(
            f"private/{name}",
            epoch,
            lambda: epoch_order(self.private[name], seed=seed, epoch=epoch),
        )

    def _remember(self, key: str, epoch: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if (key, epoch) not in self._known:
            self._known = {known: v for known, v in self._known.items() if known[1] == epoch}
            self._known[key, epoch] = make()
        return self._known[key, epoch]


Collate = Callable[[list[Any]], Any]
"""Turns a list of samples into a batch."""

_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


Read = tuple[list[Any], int | None]
"""Samples, and the index of a sample that changed when another one was read."""


class ReadSamples(Protocol):
    """The samples that were read for one step.

    Attributes:
        reused: Index of a sample that changed when another one was read; None if there is none or
            it was not checked.
    """

    reused: int | None

    def __len__(self) -> int: ...

    def batch(self, begin: int = 0, end: int | None = None, *, pristine: bool = False) -> Any:
        """Make a batch of all samples or of a part of them.

        Args:
            begin: Position of the first sample.
            end: Position after the last sample (default: all that follow).
            pristine: Copy the samples first, so that code that modifies them modifies a copy.
        """
        ...


class Samples:
    """A map-style data set as batches.

    A plain ``TensorDataset`` is indexed at once. Other data sets are read sample by sample, or by
    ``__getitems__`` where they have it, and collated.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        # The default collate makes new tensors. A user's function may return the data set's own
        # tensors.
        self._may_alias = collate is not None
        self._whole = collate is None and type(dataset) is TensorDataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the samples of these indices as one batch."""
        return self.take(indices).batch()

    def take(self, indices: Sequence[int], *, watched: bool = False) -> ReadSamples:
        """Read the samples of these indices.

        Args:
            indices: Indices of the samples.
            watched: Check whether the data set uses one object for several samples.
        """
        if self._whole:
            return _Rows(self._dataset.tensors, indices)  # type: ignore[attr-defined]
        read = self.read(indices, watched=watched)
        return _Objects(*read, collate=self._collate, may_alias=self._may_alias)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of these indices as a list."""
        many = getattr(self._dataset, "__getitems__", None)
        return many(list(indices)) if many else [self._dataset[i] for i in indices]

    def read(self, indices: Sequence[int], *, watched: bool) -> Read:
        """Read samples; see ``take``."""
        return self._watched(indices) if watched else (self.samples(indices), None)

    def _watched(self, indices: Sequence[int]) -> Read:
        if hasattr(self._dataset, "__getitems__"):
            objects = self.samples(indices)
            return objects, self._not_as_alone(indices, objects)
        objects, copies = [], []
        for index in indices:
            objects.append(self._dataset[index])
            copies.append(_copied(objects[-1]))
        for index, now, then in zip(indices, objects, copies, strict=True):
            if _differ(now, then):
                return objects, index
        return objects, None

    def _not_as_alone(self, indices: Sequence[int], objects: Sequence[Any]) -> int | None:
        """Return the first sample that shares another one's memory and differs when read alone."""
        first: dict[tuple[int, int], int] = {}
        for at, sample in enumerate(objects):
            for leaf in filter(_span, tree_leaves(sample)):
                other = first.setdefault(_place(leaf), at)
                if other == at:
                    continue
                found = _copied(objects[other])
                with borrowed_streams():
                    again = self.samples([indices[other]])[0]
                if _differ(found, again):
                    return indices[other]
        return None


class PublicAndPrivate:
    """The data that this worker can read: the public data and its private data.

    A share's public and private samples make one batch. Private samples are read only here. Other
    workers only know their number.
    """

    def __init__(
        self, public: Dataset[Any], private: Dataset[Any] | None, collate: Collate | None
    ) -> None:
        self._public = Samples(public, collate)
        self._private = Samples(private, collate) if private is not None else None
        self._collate = collate or default_collate
        self._may_alias = collate is not None
        self.generators = OwnGenerators({"public": public, "private": private, "collate": collate})
        """Random generators that the data sets and the collate function keep."""

    @property
    def num_public(self) -> int:
        """Number of samples that every worker can read."""
        return len(self._public)

    @property
    def num_private(self) -> int:
        """Number of samples that only this worker can read."""
        return len(self._private) if self._private is not None else 0

    def batch(self, public: Sequence[int], private: Sequence[int]) -> Any:
        """Return the batch of a share."""
        return self.take(public, private).batch()

    def take(
        self, public: Sequence[int], private: Sequence[int], *, watched: bool = False
    ) -> ReadSamples:
        """Read the samples of a share; see ``Samples.take``."""
        if not private or self._private is None:
            return self._public.take(public, watched=watched)
        if not public:
            return self._private.take(private, watched=watched)
        mine, one = self._private.read(private, watched=watched)
        theirs, two = self._public.read(public, watched=watched)
        reused = two if one is None else one
        return _Objects(mine + theirs, reused, collate=self._collate, may_alias=self._may_alias)


class _Rows:
    """Rows of tensors; each batch is a copy."""

    reused: int | None = None

    def __init__(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> None:
        self._tensors = tensors
        self._at = torch.tensor(indices, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._at)

    def batch(self, begin: int = 0, end: int | None = None, *, pristine: bool = False) -> Any:
        at = self._at[begin:end]
        return tuple(tensor[at] for tensor in self._tensors)


class _Objects:
    """Samples that were read one by one."""

    def __init__(
        self, samples: list[Any], reused: int | None, *, collate: Collate, may_alias: bool
    ) -> None:
        self.reused = reused
        self._samples = samples
        self._collate = collate
        self._may_alias = may_alias

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, begin: int = 0, end: int | None = None, *, pristine: bool = False) -> Any:
        samples = self._samples[begin:end]
        if pristine:
            samples = [_copied(sample) for sample in samples]
        batch = self._collate(samples)
        return _owned(batch, samples) if self._may_alias and not pristine else batch


def _owned(batch: Any, samples: Iterable[Any]) -> Any:
    """Return a batch that shares no memory with the samples.

    Changing the batch then does not change the data set.
    """
    leaves = [leaf for leaf in tree_leaves(samples) if not isinstance(leaf, _IMMUTABLE)]
    theirs = {id(leaf) for leaf in leaves}
    spans = sorted(filter(None, map(_span, leaves)))
    longest = max((end - begin for begin, end in spans), default=0)

    def own(leaf: Any) -> Any:
        if isinstance(leaf, _IMMUTABLE):
            return leaf
        span = _span(leaf)
        if span is None:
            return _copied(leaf) if id(leaf) in theirs else leaf
        at = bisect_left(spans, (span[0] - longest, 0))
        while at < len(spans) and spans[at][0] < span[1]:
            if spans[at][1] > span[0]:
                return _copied(leaf)
            at += 1
        return leaf

    return tree_map(own, batch)


def _span(leaf: Any) -> tuple[int, int] | None:
    """Return the address range of an array's memory; None for other values and empty arrays."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
        storage = leaf.untyped_storage()
        begin, num = storage.data_ptr(), storage.nbytes()
    elif isinstance(leaf, np.ndarray):
        ways = [(num - 1) * step for num, step in zip(leaf.shape, leaf.strides, strict=True)]
        begin = leaf.__array_interface__["data"][0] + sum(min(way, 0) for way in ways)
        num = leaf.itemsize + sum(map(abs, ways)) if leaf.size else 0
    else:
        return None
    return (begin, begin + num) if num else None


def _copied(value: Any) -> Any:
    """Return a copy, or the value itself if Python cannot copy it."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, _IMMUTABLE):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        try:
            return copy.deepcopy(leaf)
        except (TypeError, NotImplementedError, RuntimeError):
            return leaf

    return tree_map(copied, value)


def _place(leaf: Any) -> tuple[int, int]:
    """Return an array's address and its length in bytes."""
    if isinstance(leaf, Tensor):
        return leaf.data_ptr(), leaf.numel() * leaf.element_size()
    return leaf.__array_interface__["data"][0], leaf.nbytes


def _differ(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=False))
    return any(map(_unequal, *zip(*pairs, strict=True))) if pairs else False


def _unequal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.layout is torch.strided:
        return not (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object:
        return a.tobytes() != b.tobytes()
    return False
