"""The loader of mini-batches, and the order of its seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from thrifty.core import GraphError, OrderedPrefetcher, check_integers
from thrifty.pack import epoch_order

from ._batch import Batch, Memory, Mode, pinned_bytes
from ._features import CudaStreams, Transfer, batch_dtype
from ._gnn import make_batch
from ._graph import Graph, checked_nodes
from ._processes import Plan, ProcessBatches, Target, WorkerPool, can_fork, cuda_target
from ._sampler import NeighborSampler, Relabel
from ._slots import LEAST_BYTES, Slot, write_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOrder:
    """The batches of each epoch, as a function of ``seed`` and the epoch.

    The ranks of data-parallel training share each global batch of ``batch_size * world_size``
    seeds, in contiguous parts that differ by at most one seed. All ranks have equally many
    batches, none is empty, and each seed comes once an epoch, in one of them. If fewer seeds than
    ranks are left for the last global batch, they join the one before.

    Args:
        num_seeds: Number of seeds of all ranks.
        batch_size: Number of seeds of one rank in a batch.
        shuffle: Whether to draw a new permutation for each epoch; otherwise seeds stay in the
            given order.
        seed: Seed of the permutations.
        drop_last: Whether to leave out the last global batch if it is not full.
        rank: Which part this process takes, from 0.
        world_size: Number of processes.

    Raises:
        GraphError: An option is invalid, or there would be no batch at all.

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
        check_integers(GraphError, 1, batch_size=self.batch_size, world_size=self.world_size)
        check_integers(GraphError, 0, rank=self.rank)
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


_ARRAYS_OF_A_BATCH = 16
"""Page-locked arrays to keep for a batch, with those of a few layers that have their own arrays."""


class NeighborLoader:
    """A loader whose order and draws depend only on ``seed`` and the epoch, not on threads.

    Each pass of ``for batch in loader`` is the next epoch. You may keep a batch as long as you
    like. After SALIENT (Kaler et al., MLSys 2022, section 4), each thread makes whole batches,
    features included. For a CUDA device, processes take the place of the threads by default, since
    threads and a training loop that starts GPU kernels would wait for each other. The processes
    are forked in the first epoch and kept for later ones. They end with the loader.

    Args:
        graph: Graph to sample from, with features and labels if batches need them.
        fanouts: Neighbours of each node at each hop, the seeds' hop first; -1 for all of them.
        seeds: Nodes to make batches for: distinct node numbers, shape ``(num_seeds,)``, or a
            boolean mask, shape ``(num_nodes,)``; None for all nodes.
        batch_size: Number of seeds of one process in a batch.
        shuffle: Whether to draw a new order for each epoch; otherwise that of ``seeds`` is used.
        drop_last: Whether to leave out the last batch if it is not full.
        num_threads: Number of threads or processes that make batches ahead; 0 makes each batch
            when it is requested.
        processes: Whether processes make the batches and not threads; None for processes if the
            device is CUDA and the system is Linux. Batches are the same. Processes see the graph as
            it was in the first epoch: do not change its arrays.
        depth: Maximum number of batches that are started and not yet taken; None for twice the
            threads. Each takes the memory of its features.
        seed: Seed of the order and the draws.
        mode: See ``NeighborSampler``.
        replace: See ``NeighborSampler``.
        relabel: See ``NeighborSampler``.
        table_bytes: Limit for the tables of all threads together; see ``NeighborSampler``.
        dtype: Dtype of the features: that of the graph or float32; None for that of the graph.
        rank: Number of this process, which takes that part of each global batch of
            ``batch_size * world_size`` seeds. All ranks have equally many batches; each seed comes
            once an epoch.
        world_size: Number of processes that train together.
        device: Device of the batches. Copies to CUDA run from page-locked memory, in parallel
            with computation.

    Raises:
        GraphError: Seeds or options are invalid; the message says which.

    >>> ring = Graph(np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32), y=np.arange(5))
    >>> loader = NeighborLoader(ring, [1, 1], batch_size=2)
    >>> len(loader)
    3
    >>> sorted(int(label) for batch in loader for label in batch.y)
    [0, 1, 2, 3, 4]
    >>> loader.next_epoch
    1
    """

    def __init__(  # noqa: PLR0913 -- the options of PyG's and DGL's loaders; all are keywords
        self,
        graph: Graph,
        fanouts: Sequence[int],
        *,
        seeds: Any = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        drop_last: bool = False,
        num_threads: int = 2,
        processes: bool | None = None,
        depth: int | None = None,
        seed: int = 0,
        mode: Mode = "frontier",
        replace: bool = False,
        relabel: Relabel = "auto",
        table_bytes: int = 2**30,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_integers(GraphError, 0, num_threads=num_threads)
        if depth is not None:
            check_integers(GraphError, 1, depth=depth)
        if graph.x is not None:
            batch_dtype(graph.x.dtype, dtype)
        self._new_sampler = partial(
            NeighborSampler,
            graph,
            fanouts,
            mode=mode,
            replace=replace,
            seed=seed,
            relabel=relabel,
            table_bytes=table_bytes // max(num_threads, 1),
        )
        self.sampler = self._new_sampler()
        self.seeds = distinct_seeds(seeds, num_nodes=graph.num_nodes)
        self.order = SeedOrder(
            num_seeds=len(self.seeds),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.sampler.seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self.dtype = dtype
        self.device = _checked_device(device)
        self.num_threads = num_threads
        if processes and not can_fork():
            raise GraphError("processes=True needs Linux; give processes=False, for threads")
        auto = self.device.type == "cuda" and can_fork()
        self.processes = auto if processes is None else bool(processes)
        self.depth = max(2 * num_threads, 1) if depth is None else depth
        self._memory = self._new_memory()
        self._pools: list[WorkerPool] = []
        self._next_epoch = 0

    @property
    def graph(self) -> Graph:
        """Graph that batches are sampled from."""
        return self.sampler.graph

    @property
    def num_seeds(self) -> int:
        """Number of seeds of all processes."""
        return len(self.seeds)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass yields.

        Set it to continue where an earlier run ended.

        Raises:
            GraphError: It is set to something that is not a valid epoch.
        """
        return self._next_epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        check_integers(GraphError, 0, next_epoch=epoch)
        self._next_epoch = int(epoch)

    def __len__(self) -> int:
        """Return the number of batches in an epoch for this process."""
        return self.order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches of the next epoch."""
        batches = self.epoch(self._next_epoch)
        self._next_epoch += 1
        return batches

    def epoch(self, number: int, *, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch, the same ones each time.

        Any number of epochs may be in progress at once. Threads begin now and end with the last
        batch, or when the iterator is dropped. Processes begin now, too, and then wait for the
        next epoch.

        Args:
            number: The epoch.
            start: First batch, from 0; those before are not made.
            stop: Batch after the last one; None for all.

        Raises:
            GraphError: The epoch or one of the batches does not exist.
        """
        stop = len(self) if stop is None else stop
        check_integers(GraphError, 0, epoch=number, start=start, stop=stop)
        if not start <= stop <= len(self):
            raise GraphError(
                f"an epoch has {len(self)} batches, so there are none from {start} to {stop}"
            )
        number, num = int(number), stop - start
        places = self.order.of(epoch=number)
        if self.processes and self.num_threads and num:
            return self._made_by_processes(places, number, start=start, num=num)
        in_order = partial(self._make, places, number)

        def make(index: int) -> Batch:
            return in_order(start + index)

        if self.device.type == "cuda":
            transfer = Transfer(CudaStreams(self.device), self._memory)
            return map(transfer.receive, self._made(lambda index: transfer.send(make(index)), num))
        batches = self._made(make, num)
        if self.device.type == "cpu":
            return batches
        return (batch.to(self.device) for batch in batches)

    def batch(self, epoch: int, index: int) -> Batch:
        """Make one batch of an epoch by itself, equal to that of ``epoch(epoch)``.

        Args:
            epoch: Epoch of the batch.
            index: Position of the batch in this process's part of the epoch, from 0.

        Raises:
            GraphError: The epoch or the batch does not exist.
        """
        check_integers(GraphError, 0, epoch=epoch, index=index)
        if index >= len(self):
            raise GraphError(f"an epoch has {len(self)} batches, so none of index {index}")
        made = self._make(self.order.of(epoch=int(epoch)), int(epoch), int(index))
        return made.to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tables and processes, which are made again."""
        return self.__dict__ | {"sampler": self._new_sampler(), "_pools": []}

    def _made(self, make: Callable[[int], Any], num: int) -> Iterator[Any]:
        if self.num_threads:
            return OrderedPrefetcher(make, num, num_threads=self.num_threads, depth=self.depth)
        return map(make, range(num))

    def _made_by_processes(
        self, places: np.ndarray, epoch: int, *, start: int, num: int
    ) -> Iterator[Batch]:
        # Without a reference to this loader, which would make a cycle with its pools.
        seeds, order = self.seeds, self.order
        plan = Plan(
            epoch=epoch,
            num=num,
            seeds=lambda position: seeds[places[order.part(start + position)]],
            number=lambda position: order.number(start + position),
        )
        batches = ProcessBatches(self._pool(plan), plan, self._pools)
        if self.device.type in {"cpu", "cuda"}:
            return batches
        return (batch.to(self.device) for batch in batches)

    def _pool(self, plan: Plan) -> WorkerPool:
        """Return idle processes, or new ones."""
        with suppress(IndexError):
            pool = self._pools.pop()
            if pool.makes(self.sampler, self.dtype):
                return pool
            pool.close()
        cuda = self.device.type == "cuda"
        return WorkerPool(
            self.sampler,
            self.dtype,
            cuda_target(self.device, self._memory) if cuda else Target(None, None, self._memory),
            num_processes=min(self.num_threads, len(self)),
            depth=min(self.depth, len(self)),
            num_bytes=self._expected_bytes(plan),
        )

    def _expected_bytes(self, plan: Plan) -> int:
        """Return the size of a batch, with room for larger ones.

        Making one also compiles the kernels, before the processes are forked.
        """
        slot = Slot()
        num_bytes = LEAST_BYTES
        with suppress(Exception):  # raised again at the place of its batch
            num_bytes = write_batch(
                slot,
                self.sampler,
                plan.seeds(0),
                epoch=plan.epoch,
                index=plan.number(0),
                dtype=self.dtype,
            )
        slot.close()
        return num_bytes + num_bytes // 4

    def _make(self, places: np.ndarray, epoch: int, index: int) -> Batch:
        return make_batch(
            self.sampler,
            self.seeds[places[self.order.part(index)]],
            epoch=epoch,
            index=self.order.number(index),
            dtype=self.dtype,
            memory=self._memory,
        )

    def _new_memory(self) -> Memory:
        # One for each started batch, and those that the caller works with.
        num = self.depth + 2
        if self.device.type == "cuda":
            return Memory(keep=num * _ARRAYS_OF_A_BATCH, allocate=pinned_bytes)
        return Memory(keep=num)


def distinct_seeds(seeds: Any, *, num_nodes: int) -> np.ndarray:
    """Return seeds as node numbers; int64, shape ``(num_seeds,)``.

    The seeds may be numbers, a boolean mask, or None for all nodes.

    Raises:
        GraphError: A node does not exist or is listed twice, or a mask has the wrong shape.
    """
    if seeds is None:
        return np.arange(num_nodes)
    array = seeds.detach().cpu().numpy() if isinstance(seeds, torch.Tensor) else np.asarray(seeds)
    if array.dtype.kind == "b":
        if array.shape != (num_nodes,):
            raise GraphError(
                f"the mask of seeds has shape {array.shape}; give one entry for each of the "
                f"{num_nodes} nodes"
            )
        return np.flatnonzero(array)
    # A copy, so that later writes of the caller do not change epochs.
    array = checked_nodes(array, num_nodes=num_nodes, name="seed").copy()
    values, counts = np.unique(array, return_counts=True)
    if len(values) < len(array):
        raise GraphError(
            f"{len(array) - len(values)} of {len(array)} seeds are there already, such as node "
            f"{values[counts.argmax()]}; "
            "an epoch has each seed once: give np.unique(seeds)"
        )
    return array


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GraphError(f"device={device!r}; give a device such as 'cpu' or 'cuda'") from error
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise GraphError(f"device={str(device)!r}, but PyTorch finds no CUDA device; give 'cpu'")
    return checked
