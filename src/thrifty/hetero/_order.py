"""Which samples a step trains on, and who has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thrifty.core import HeteroError, derive_seed
from thrifty.pack import epoch_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker trains on in one step.

    Attributes:
        public: indices into the public data.
        private: indices into the worker's own.
    """

    public: tuple[int, ...]
    private: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.public) + len(self.private)


@dataclass(slots=True, kw_only=True)
class Place:
    """How far the data have been gone through; everything an order needs to go on.

    Attributes:
        epoch: from 0.
        public: samples of the public data that this epoch has used.
        private: samples that each worker has used of its own, by name.
    """

    epoch: int = 0
    public: int = 0
    private: dict[str, int] = field(default_factory=dict)


class SampleOrder:
    """Each sample once an epoch, whoever trains it.

    The public data are one permutation an epoch, a function of seed and epoch alone; a step takes the next positions of it, and a split only says who takes which. Private samples are used where they
    are: evenly over the epoch's steps, with public ones added up to the worker's share (Stannis). A worker with more private samples than its share trains the rest at the end, in steps of its own, or,
    with ``subsample``, trains another part of them each epoch.

    Args:
        num_public: samples that everybody can read.
        seed: of the study.
        private: samples that a worker alone can read, by its name; a worker that is not named has none.
        subsample: leave out private samples beyond a worker's share of the epoch.

    Raises:
        HeteroError: there is no sample at all.

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
        """Samples that the present workers have still to train in this epoch."""
        return self.num_public - place.public + sum(self.own_left(place, split, names))

    def shares(
        self,
        place: Place,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        own_left: Sequence[int] | None = None,
    ) -> tuple[Share, ...]:
        """What each worker trains on in the next step.

        Args:
            place: how far the epoch is.
            sizes: samples for each worker; they get fewer where there are not enough.
            names: of the workers, by rank.
            own_left: private samples that each is still to train, where ``sizes`` are not those of a whole step.
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
        """Notes that these shares were trained."""
        place.public += sum(len(share.public) for share in shares)
        for name, share in zip(names, shares, strict=True):
            if share.private:
                place.private[name] = place.private.get(name, 0) + len(share.private)

    def own_left(self, place: Place, split: Sequence[int], names: Sequence[str]) -> list[int]:
        """Private samples that each worker has still to train in this epoch, of a whole step's split."""
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
        """Private and public samples of each worker; a slice of the public ones ends where they end."""
        public_left = self.num_public - place.public
        steps = max(1, math.ceil((public_left + sum(own_left)) / max(1, sum(split))))
        own = [
            min(size, num, math.ceil(num / steps))
            for size, num in zip(split, own_left, strict=True)
        ]
        public = [size - num for size, num in zip(split, own, strict=True)]
        for worker in sorted(
            range(len(split)), key=lambda worker: own[worker] - own_left[worker]
        ):
            # Where the public data end, those who have private samples left use more of them.
            short = sum(public) - public_left
            if short <= 0:
                break
            more = min(short, own_left[worker] - own[worker], public[worker])
            own[worker] += more
            public[worker] -= more
        return own, public

    def _public(self, epoch: int) -> torch.Tensor:
        """As ``thrifty.pack`` orders the data of a task, so that a job of many workers is the same trial as one alone."""
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
