"""The seeds of each batch of an epoch, for one process or many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thrifty.core import GraphError
from thrifty.pack import epoch_order

from ._check import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOrder:
    """The batches of each epoch, as a function of ``seed`` and the epoch.

    The ranks of data-parallel training share each global batch of ``batch_size * world_size``
    seeds, in contiguous parts that differ by at most one seed. All ranks have equally many
    batches, none is empty, and each seed comes once an epoch, in one of them. If fewer seeds than
    ranks are left for the last global batch, they join the one before.

    Args:
        num_seeds: number of seeds of all ranks.
        batch_size: number of seeds of one rank in a batch.
        shuffle: whether to draw a new permutation for each epoch; otherwise seeds stay in the
            given order.
        seed: seed of the permutations.
        drop_last: whether to leave out the last global batch if it is not full.
        rank: which part this process takes, from 0.
        world_size: number of processes.

    Raises:
        GraphError: an option is invalid, or there would be no batch at all.

    >>> order = SeedOrder(num_seeds=10, batch_size=2, shuffle=False, rank=1, world_size=2)
    >>> [order.of(epoch=0)[order.part(batch)].tolist() for batch in range(order.num_batches)]
    [[2, 3], [6, 7], [9]]
    """

    num_seeds: int
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not self.num_seeds:
            raise GraphError("there are no seeds; give at least one node")
        at_least(1, batch_size=self.batch_size, world_size=self.world_size)
        at_least(0, rank=self.rank)
        if self.rank >= self.world_size:
            raise GraphError(
                f"rank={self.rank} and world_size={self.world_size}; ranks go from 0 to "
                "world_size - 1"
            )
        if self.drop_last and self.num_seeds < self._global_size:
            raise GraphError(
                f"drop_last=True leaves no batch: {self.num_seeds} seeds are fewer than "
                "batch_size * world_size = "
                f"{self._global_size}; give a smaller batch_size or drop_last=False"
            )
        if self.num_seeds < self.world_size:
            raise GraphError(
                f"{self.num_seeds} seeds for {self.world_size} ranks: some would have no "
                "batch; use fewer ranks"
            )

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch, the same for all ranks."""
        full, rest = divmod(self.num_seeds, self._global_size)
        return full if self.drop_last or (full and rest < self.world_size) else full + 1

    def of(self, epoch: int) -> np.ndarray:
        """Return the seeds' positions in the order of an epoch; int64, shape ``(num_seeds,)``."""
        if not self.shuffle:
            return np.arange(self.num_seeds)
        return epoch_order(self.num_seeds, seed=self.seed, epoch=epoch).numpy()

    def part(self, batch: int) -> slice:
        """Return the slice of an epoch's order that is this rank's part of a batch."""
        first = batch * self._global_size
        joined = not self.drop_last and batch == self.num_batches - 1
        size = self.num_seeds - first if joined else self._global_size
        return slice(
            first + self.rank * size // self.world_size,
            first + (self.rank + 1) * size // self.world_size,
        )

    def number(self, batch: int) -> int:
        """Return a number that no other rank's batch has, so that draws differ between ranks."""
        return batch * self.world_size + self.rank

    @property
    def _global_size(self) -> int:
        return self.batch_size * self.world_size
