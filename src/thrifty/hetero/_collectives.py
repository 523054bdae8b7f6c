"""How long sums over the workers take, measured."""

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
    """Times sums of so many bytes over all workers; what ``CollectiveModel`` learns from.

    All workers call it with the same arguments, and get the same answer: of each size the median of the repeats, the mean over the workers. One worker alone has nothing to measure, and gets an empty list.

    Args:
        members: carry the sums.
        sizes: bytes of the tensors; whole numbers of float32 are summed.
        name: of the network, such as the VM type.
        per_node: workers of each machine.
        repeats: sums of each size, after some to warm up.
        device: of the tensors.
        clock: to read; the machine's unless told.

    Raises:
        HeteroError: sizes or repeats that nothing can be measured with, or machines with unequal numbers of workers.
        PeerLostError: a worker is gone.

    >>> from thrifty.hetero import FixedMembership
    >>> measure_all_reduce(FixedMembership(), [2**10, 2**20], name="here")
    []
    """
    clock = clock or SystemClock()
    if repeats < 1 or any(size < 4 for size in sizes):
        raise HeteroError(
            f"each size is summed at least once, and has 4 bytes or more; not repeats={repeats}, sizes={list(sizes)}"
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
