"""Fixed membership: the workers that torchrun started, as long as all of them are alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core import PeerLostError, TooFewWorkersError

from ._membership import View, Wait


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
                with _losses("a sum over all workers"):
                    work.wait()

        work = None
        if self._together:
            with _losses("a sum over all workers"):
                work = dist.all_reduce(tensor, async_op=True)
        return wait

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast a tensor to the group."""
        if self._together:
            with _losses("a broadcast to all workers"):
                dist.broadcast(tensor, source)

    def close(self) -> None:
        """Destroy the group if this object created it."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = self._together = False


@contextmanager
def _losses(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"{what} failed: {error}") from error
