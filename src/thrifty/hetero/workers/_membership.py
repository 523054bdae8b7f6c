"""Who takes part, the group that is fixed from the start, and the time of its sums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core import Clock, HeteroError, PeerLostError, SystemClock, TooFewWorkersError
from thrifty.perf import CollectiveTiming


Wait = Callable[[], None]
"""Waits for a sum that was begun; raises ``PeerLostError`` if a worker is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The workers of one generation, as all of them see it.

    Attributes:
        generation: Number that grows with every change.
        rank: Rank of this worker.
        names: Names of the workers, by rank.
        steps: Steps that each of them has trained.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def furthest(self) -> int:
        """Rank of the worker with most steps trained (the lowest such rank). Its state counts."""
        return self.steps.index(max(self.steps))


class Membership(Protocol):
    """Agrees on the workers that train together, and carries sums between them.

    Every wait ends, either with its result or with an error after the implementation's time limit.
    """

    def agree(self, *, step: int, broken: bool = False) -> View:
        """Agree with the other workers on the members.

        All workers call it at the same steps, and after a ``PeerLostError``.

        Args:
            step: Steps that this worker has trained.
            broken: Whether the connections of the present generation have failed.

        Raises:
            TooFewWorkersError: Not enough workers are left, or enough do not come in time.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over all workers.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin an ``all_reduce`` and return, so that the caller can do other work meanwhile.

        The caller must not touch the tensor until it has waited for the sum. All workers begin
        their sums in one order, and wait for them in that order.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Replace a contiguous tensor by that of the worker with rank ``source``.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def close(self) -> None:
        """Leave the group; may be called twice."""
        ...


class FixedMembership:
    """The default group of ``torch.distributed``, or a single worker where none was started.

    When started with plain ``torchrun --nproc-per-node=4 train.py``, it creates the group, with
    NCCL for CUDA devices and gloo otherwise. A worker that dies ends the job, and torchrun restarts
    all of them. ``ElasticMembership`` continues without it.

    Args:
        device: Device of the model.
        timeout_s: Timeout of every exchange.

    >>> members = FixedMembership()
    >>> members.agree(step=0).names
    ('0',)
    """

    def __init__(self, *, device: torch.device | str = "cpu", timeout_s: float = 300.0) -> None:
        self._owns = False
        if dist.is_available() and not dist.is_initialized() and "RANK" in os.environ:
            backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            self._owns = True
        self._together = dist.is_available() and dist.is_initialized()

    def agree(self, *, step: int, broken: bool = False) -> View:
        """Return the group as it was started."""
        if broken:
            raise TooFewWorkersError(
                "a worker was lost, and this group cannot go on without it; give the trainer an "
                "ElasticMembership to have it go on, or let torchrun start all workers again"
            )
        size = dist.get_world_size() if self._together else 1
        rank = dist.get_rank() if self._together else 0
        names = tuple(str(rank) for rank in range(size))
        return View(generation=0, rank=rank, names=names, steps=(step,) * size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group."""
        self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin to sum a tensor over the group."""

        def wait() -> None:
            if work is not None:
                with peer_losses("a sum over all workers"):
                    work.wait()

        work = None
        if self._together:
            with peer_losses("a sum over all workers"):
                work = dist.all_reduce(tensor, async_op=True)
        return wait

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast a tensor to the group."""
        if self._together:
            with peer_losses("a broadcast to all workers"):
                dist.broadcast(tensor, source)

    def close(self) -> None:
        """Destroy the group if this object created it."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = self._together = False


@contextmanager
def peer_losses(what: str) -> Iterator[None]:
    """Turn errors of a group into the error that a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence of gloo's message says what happened. The rest is advice for its
        # developers.
        raise PeerLostError(f"{what} failed: {str(error).partition('. ')[0]}") from error


_WARM_UP = 2


def measure_all_reduce(
    members: Membership,
    sizes: Sequence[int],
    *,
    name: str,
    per_node: int = 1,
    repeats: int = 10,
    device: torch.device | str = "cpu",
    clock: Clock | None = None,
) -> list[CollectiveTiming]:
    """Time all-reduce of several sizes over all workers, to fit a ``CollectiveModel``.

    All workers call it with the same arguments and get the same answer: for each size, the median
    over the repeats and the mean over the workers. A single worker has nothing to measure and gets
    an empty list.

    Args:
        members: Membership that carries the sums.
        sizes: Bytes of the tensors, rounded down to whole float32 numbers.
        name: Name of the network, such as the VM type.
        per_node: Workers on each machine.
        repeats: Timed sums of each size, after some warm-up sums.
        device: Device of the tensors.
        clock: Clock to measure with (default: the machine's).

    Raises:
        HeteroError: ``repeats`` is below 1, a size is below 4 bytes, or the machines have unequal
            numbers of workers.
        PeerLostError: A worker is gone.

    >>> from thrifty.hetero import FixedMembership
    >>> measure_all_reduce(FixedMembership(), [2**10, 2**20], name="here")
    []
    """
    clock = clock or SystemClock()
    if repeats < 1 or any(size < 4 for size in sizes):
        raise HeteroError(
            f"each size is summed at least once, and has 4 bytes or more; not repeats={repeats}, "
            f"sizes={list(sizes)}"
        )
    num = len(members.agree(step=0).names)
    if per_node < 1 or num % per_node:
        raise HeteroError(f"{num} workers cannot be {per_node} on each machine: mend per_node")
    if num == 1:
        return []
    counts = [size // 4 for size in sizes]
    own = [
        _median_s(members, torch.zeros(count, device=device), repeats=repeats, clock=clock)
        for count in counts
    ]
    total = torch.tensor(own, dtype=torch.float64, device=device)
    members.all_reduce(total)
    return [
        CollectiveTiming(
            name=name,
            num_bytes=4 * count,
            nodes=num // per_node,
            per_node=per_node,
            seconds=seconds / num,
        )
        for count, seconds in zip(counts, total.tolist(), strict=True)
    ]


def _median_s(
    members: Membership, tensor: torch.Tensor, *, repeats: int, clock: Clock
) -> float:
    times = []
    for _ in range(_WARM_UP + repeats):
        began = clock.monotonic()
        members.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(max(clock.monotonic() - began, 1e-9))
    return median(times[_WARM_UP:])
