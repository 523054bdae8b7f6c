"""Parameters and gradients as flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from thrifty.core import HeteroError
from thrifty.hetero.workers._membership import Wait


Begin = Callable[[Tensor], Wait]
"""Begins the sum of a tensor over all workers."""

_MIB = 2**20
_FIRST_CAP_MIB = 1.0
"""The first bucket is small, so that the first sum begins early (as in PyTorch's DDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A slice of a buffer that is summed at once."""

    values: Tensor
    members: Sequence[int]


class FlatGradients:
    """One buffer per type of gradient.

    Each parameter's ``grad`` is a view of a buffer, so nothing is copied.

    One of the buffers ends with ``num_control`` numbers, and one number per parameter for whether
    it had a gradient. Thus everything that the workers exchange at a step travels with the
    gradients.

    Parameters lie in the buffers in reverse order, as a backward pass reaches them, and are summed
    bucket by bucket, if requested already during the backward pass (Li et al., "PyTorch
    Distributed", VLDB 2020, section 3.2). Buckets are begun in one order on all workers,
    independent of the order of their gradients.

    Args:
        parameters: Parameters that need a gradient.
        num_control: Number of control numbers.
        bucket_cap_mb: MiB of a bucket; None: each buffer is one bucket, and nothing is summed
            before ``reduce``.

    Raises:
        HeteroError: No parameter needs a gradient.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        num_control: int,
        bucket_cap_mb: float | None = None,
    ) -> None:
        members = [parameter for parameter in parameters if parameter.requires_grad][::-1]
        if not members:
            raise HeteroError("no parameter of the model needs a gradient")
        self._members = members
        self._views: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._gradients: list[Tensor] = []
        numbers, early, late = self._lay_out(num_control + len(members), cap_mb=bucket_cap_mb)
        self.control, self._used = numbers[:num_control], numbers[num_control:]
        self._buckets = [*sorted(early, key=lambda bucket: bucket.members[-1]), *late]
        self._bucket_of = {
            at: index for index, bucket in enumerate(self._buckets) for at in bucket.members
        }
        self._early = len(early) if bucket_cap_mb is not None else 0
        self._touched: set[int] = set()
        self._touched_now: set[int] = set()
        self._missing: list[int] = []
        self._begin: Begin | None = None
        self._waits: list[Wait] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._touch, at)
            )
            for at, parameter in enumerate(members)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers: what a worker sends at each step."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def close(self) -> None:
        """Release the parameters, so that another buffer can take over."""
        for hook in self._hooks:
            hook.remove()
        for at, parameter in enumerate(self._members):
            # A parameter that is frozen from now on must not keep its last gradient.
            grad = parameter.grad
            if grad is not None and grad.data_ptr() == self._views[at].data_ptr():
                parameter.grad = None

    def zero(self, begin: Begin | None = None) -> None:
        """Zero all buffers before a backward pass.

        Args:
            begin: Begins a sum; None: this pass is not a step, and none of it is summed.
        """
        self._touched.clear()
        self._touched_now.clear()
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._begin, self._waits = begin, []
        for buffer in self._buffers:
            buffer.zero_()
        for at, parameter in enumerate(self._members):
            parameter.grad = self._views[at]

    def begin_last(self, begin: Begin) -> None:
        """Sum during the next backward pass, which adds the last part of the gradients.

        Args:
            begin: Begins a sum.
        """
        self._touched_now.clear()
        self._begin = begin

    def collect(self) -> None:
        """Copy in gradients that landed elsewhere; call this after a backward pass."""
        for at in range(len(self._members)):
            if self._bucket_of[at] >= len(self._waits):
                self._take_in(at)
        for at in self._touched:
            self._used[at] = 1.0

    def reduce(self, begin: Begin) -> None:
        """Sum over the workers what is not summed yet, and wait for all sums.

        A parameter that no worker's loss depends on has no gradient afterwards, as in one process.
        An optimizer then leaves it alone, including its weight decay.
        """
        for bucket in self._buckets[len(self._waits) :]:
            self._waits.append(begin(bucket.values))
        for wait in self._waits:
            wait()
        self._begin, self._waits = None, []
        for parameter, used in zip(self._members, self._used.tolist(), strict=True):
            if not used:
                parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a number."""
        for each in self._gradients:
            each.mul_(factor)

    def clip(self, max_norm: float) -> None:
        """Scale all gradients down to this norm if theirs is larger."""
        wide = max((each.dtype for each in self._gradients), key=lambda kind: kind.itemsize)
        wide = torch.promote_types(wide, torch.float32)
        norms = [torch.linalg.vector_norm(each, dtype=wide) for each in self._gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in self._gradients:
            each.mul_(factor)

    def _lay_out(
        self, num_numbers: int, *, cap_mb: float | None
    ) -> tuple[Tensor, list[_Bucket], list[_Bucket]]:
        """Make a buffer for each type of gradient, with a view of it for each parameter.

        Args:
            num_numbers: Count of the numbers that travel with the gradients.
            cap_mb: MiB of a bucket; None: each buffer is one bucket.

        Returns:
            Memory for these numbers, the full buckets, and those of the rests in order.
        """
        members = self._members
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, member in enumerate(members):
            groups.setdefault((member.dtype, member.device), []).append(at)
        # Times and counts need at least the precision of float32.
        wide = next((key for key in groups if key[0].itemsize >= 4), None)
        numbers = torch.zeros(num_numbers if wide is None else 0, device=members[0].device)
        early: list[_Bucket] = []
        late: list[_Bucket] = []
        for key, indices in groups.items():
            size = sum(members[at].numel() for at in indices)
            num = size + (num_numbers if key == wide else 0)
            buffer = torch.zeros(num, dtype=key[0], device=key[1])
            self._buffers.append(buffer)
            self._gradients.append(buffer[:size])
            if key == wide:
                numbers = buffer[size:]
            begin = 0
            for at in indices:
                end = begin + members[at].numel()
                self._views[at] = buffer[begin:end].view_as(members[at])
                begin = end
            *full, rest = self._cut(buffer, indices, cap_mb)
            early += full
            # The control numbers are only known at the end, so their bucket is the last one.
            late.insert(len(late) if key == wide else 0, rest)
        if wide is None:
            self._buffers.append(numbers)
            late.append(_Bucket(values=numbers, members=()))
        return numbers, early, late

    def _cut(self, buffer: Tensor, indices: Sequence[int], cap_mb: float | None) -> list[_Bucket]:
        """Cut a buffer into full buckets and one for the rest, which may contain no gradients."""
        buckets: list[_Bucket] = []
        begin = end = 0
        inside: list[int] = []
        for at in indices:
            end += self._members[at].numel()
            inside.append(at)
            cap = None if cap_mb is None else cap_mb if buckets else min(cap_mb, _FIRST_CAP_MIB)
            if cap is not None and (end - begin) * buffer.element_size() >= cap * _MIB:
                buckets.append(_Bucket(values=buffer[begin:end], members=inside))
                begin, inside = end, []
        return [*buckets, _Bucket(values=buffer[begin:], members=inside)]

    def _touch(self, at: int, _: nn.Parameter) -> None:
        """Record that a parameter's gradient is ready."""
        first = at not in self._touched_now
        self._touched_now.add(at)
        self._touched.add(at)
        if self._begin is None:
            return
        if self._bucket_of[at] < len(self._waits):
            raise HeteroError(
                "a gradient changed after its sum over the workers had begun: the loss goes "
                "backward more than once; ask for HeteroOptions(bucket_cap_mb=None)"
            )
        self._take_in(at)
        self._missing[self._bucket_of[at]] -= first
        while len(self._waits) < self._early and not self._missing[len(self._waits)]:
            self._waits.append(self._begin(self._buckets[len(self._waits)].values))

    def _take_in(self, at: int) -> None:
        parameter, view = self._members[at], self._views[at]
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            raise HeteroError(
                "sparse gradients cannot be summed side by side with others; use sparse=False"
            )
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view


_CAPS = (1 * _MIB, 25 * _MIB)
"""Byte caps of the first bucket and of the others, as in PyTorch's DDP."""


def median_shape(shapes: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return when each gradient is ready: the median share of the backward pass, by parameter."""
    return {
        at: median(shape[at] for shape in shapes if at in shape)
        for at in sorted(set().union(*shapes))
    }


def gradient_buckets(
    parameters: Sequence[nn.Parameter], ready: dict[int, float]
) -> list[tuple[float, float]]:
    """Return the size and the completion time of each bucket, in the order of their sums.

    Each bucket holds tensors of one dtype and device.

    Args:
        parameters: Parameters in the order in which a backward pass reaches them.
        ready: For each parameter with a gradient, the share of the backward pass after which the
            gradient is ready.

    Returns:
        Pairs of a bucket's bytes and the share of the backward pass after which it is complete.

    Raises:
        HeteroError: No parameter got a gradient.
    """
    if not ready:
        raise HeteroError("no parameter got a gradient: the loss depends on none of them")
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    closed: list[list[int]] = []
    started: set[tuple[torch.dtype, torch.device]] = set()

    def num_bytes(members: Sequence[int]) -> int:
        return sum(parameters[at].numel() * parameters[at].element_size() for at in members)

    for at in sorted(ready):
        kind = parameters[at].dtype, parameters[at].device
        filling.setdefault(kind, []).append(at)
        if num_bytes(filling[kind]) >= _CAPS[kind in started]:
            closed.append(filling.pop(kind))
            started.add(kind)
    out, latest = [], 0.0
    for members in [*closed, *filling.values()]:
        # Buckets are summed in order, so a bucket waits for all buckets before it.
        latest = max(latest, *(ready[at] for at in members))
        out.append((float(num_bytes(members)), latest))
    return out
