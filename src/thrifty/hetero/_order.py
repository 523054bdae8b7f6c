"""Sample order: the samples of each step, and which worker trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from thrifty.core import HeteroError, derive_seed
from thrifty.pack import epoch_order


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
