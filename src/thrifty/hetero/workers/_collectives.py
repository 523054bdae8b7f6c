"""Measured times of all-reduce over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from thrifty.core import Clock, HeteroError, SystemClock
from thrifty.perf import CollectiveTiming

from ._membership import Membership


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
