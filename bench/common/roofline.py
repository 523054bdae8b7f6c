"""What a device reaches, and what a training step asks of it.

The least time of a step is the largest of three: its operations by the rate of a large product, its
bytes by the rate of a large copy, and its kernels by the rate at which a CUDA graph starts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


KERNEL_S = 2e-6
"""Seconds that a small kernel of a CUDA graph takes at least, roughly."""


PICKING = frozenset({"index", "index_select", "gather", "embedding"})
"""Calls that read as much of a tensor as they return."""


class Work(NamedTuple):
    """What a step does: operations, bytes that its calls read and write, and calls."""

    flops: float
    moved: float
    calls: int


class _Moved(TorchDispatchMode):
    """Counts calls that compute something, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0.0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
            picks = func.overloadpacket.__name__ in PICKING
            touched = (out, out) if picks else (args, kwargs, out)
            tensors = [each for each in tree_leaves(touched) if isinstance(each, torch.Tensor)]
            self.calls += 1
            self.moved += sum(each.numel() * each.element_size() for each in tensors)
        return out


def work_of(step: Callable[[], Any]) -> Work:
    """Return what a step does; calls that PyTorch fuses count once."""
    moved, flops = _Moved(), FlopCounterMode(display=False)
    with flops, moved:
        step()
    return Work(float(flops.get_total_flops()), moved.moved, moved.calls)


def reached(device: str) -> tuple[float, float]:
    """Return the operations and bytes a second that a large product and a large copy reach."""
    a = torch.randn(2048, 2048, device=device)
    big = torch.randn(2**25, device=device)
    into = torch.empty_like(big)

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - began)
        return min(times)

    flops = 2 * 2048**3 / best(lambda: a @ a)
    return flops, 2 * big.numel() * 4 / best(lambda: into.copy_(big))


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def bound_of(
    work: Work, *, k: int, rate: float, flops_s: float, bytes_s: float
) -> dict[str, float | str]:
    """Return the seconds that each bound allows for a step of ``k`` trials, and the share reached.

    Args:
        work: What one trial's step does.
        k: Trials that one step trains; its kernels are those of one trial.
        rate: Trial-steps a second that were reached.
        flops_s: Operations a second of the device.
        bytes_s: Bytes a second of the device.

    >>> bound_of(Work(1e9, 1e6, 100), k=10, rate=1e4, flops_s=1e13, bytes_s=1e12)["bound by"]
    'compute'
    """
    least = {
        "launches": work.calls * KERNEL_S,
        "memory": k * work.moved / bytes_s,
        "compute": k * work.flops / flops_s,
    }
    bound = max(least, key=least.__getitem__)
    return {
        **{f"{name}, us": 1e6 * seconds for name, seconds in least.items()},
        "a step, us": 1e6 * k / rate,
        "bound by": bound,
        "share of the roofline, %": 100 * least[bound] * rate / k,
    }
