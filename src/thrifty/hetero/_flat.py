"""Gradients side by side in one buffer, with what workers tell each other at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from thrifty.core import HeteroError

from ._membership import Wait


Begin = Callable[[Tensor], Wait]
"""Begins the sum of a tensor over all workers."""

_MIB = 2**20
_FIRST_CAP_MIB = 1.0
"""The first bucket is small, so that the first sum begins early (as in PyTorch's DDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A piece of a buffer that is summed at once."""

    values: Tensor
    members: Sequence[int]


class FlatGradients:
    """One buffer for each type of gradient; ``grad`` of every parameter is a view of it, so nothing is copied.

    One of the buffers ends with ``num_control`` numbers, and one for each parameter, whether it had a gradient: all that the workers tell each other at a step goes with the gradients.

    Parameters lie in the buffers in the reverse of their order, as a backward pass comes to them, and are summed bucket by bucket: while it goes on, if told (Li et al., "PyTorch Distributed", VLDB
    2020, section 3.2). Buckets are begun in one order on all workers, whatever the order of their gradients.

    Args:
        parameters: that need a gradient.
        num_control: numbers told.
        bucket_cap_mb: MiB of a bucket; None: each buffer is one, and nothing is summed before ``reduce``.

    Raises:
        HeteroError: there is nothing to train.
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
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, member in enumerate(members):
            groups.setdefault((member.dtype, member.device), []).append(at)
        # Times and counts need the precision of float32 at least.
        wide = next((key for key in groups if key[0].itemsize >= 4), None)
        told = num_control + len(members)
        self._members = members
        self._views: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._gradients: list[Tensor] = []
        tail = torch.zeros(told if wide is None else 0, device=members[0].device)
        early: list[_Bucket] = []
        late: list[_Bucket] = []
        for key, indices in groups.items():
            size = sum(members[at].numel() for at in indices)
            buffer = torch.zeros(
                size + (told if key == wide else 0), dtype=key[0], device=key[1]
            )
            self._buffers.append(buffer)
            self._gradients.append(buffer[:size])
            if key == wide:
                tail = buffer[size:]
            begin = 0
            for at in indices:
                end = begin + members[at].numel()
                self._views[at] = buffer[begin:end].view_as(members[at])
                begin = end
            *full, rest = self._cut(buffer, indices, bucket_cap_mb)
            early += full
            # What is told is known at the end: its bucket is the last one.
            late.insert(len(late) if key == wide else 0, rest)
        if wide is None:
            self._buffers.append(tail)
            late.append(_Bucket(values=tail, members=()))
        self.control, self._used = tail[:num_control], tail[num_control:]
        self._buckets = [*sorted(early, key=lambda bucket: bucket.members[-1]), *late]
        self._bucket_of = {
            at: index for index, bucket in enumerate(self._buckets) for at in bucket.members
        }
        self._early = len(early) if bucket_cap_mb is not None else 0
        self._touched: set[int] = set()
        self._missing: list[int] = []
        self._begin: Begin | None = None
        self._waits: list[Wait] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._touch, at))
            for at, parameter in enumerate(members)
        ]

    @property
    def num_bytes(self) -> int:
        """Of all buffers: what a worker hands in at a step."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the parameters: another buffer takes its place."""
        for hook in self._hooks:
            hook.remove()
        for at, parameter in enumerate(self._members):
            # A parameter that is frozen from now on must not keep its last gradient.
            grad = parameter.grad
            if grad is not None and grad.data_ptr() == self._views[at].data_ptr():
                parameter.grad = None

    def zero(self, begin: Begin | None = None) -> None:
        """Before a backward pass.

        Args:
            begin: a sum; None: this pass is no step, and nothing of it is summed.
        """
        self._touched.clear()
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._begin, self._waits = begin, []
        for buffer in self._buffers:
            buffer.zero_()
        for at, parameter in enumerate(self._members):
            parameter.grad = self._views[at]

    def collect(self) -> None:
        """After a backward pass: takes in gradients that landed elsewhere."""
        for at in range(len(self._members)):
            if self._bucket_of[at] >= len(self._waits):
                self._take_in(at)
        for at in self._touched:
            self._used[at] = 1.0

    def reduce(self, begin: Begin) -> None:
        """Sums over the workers what is not summed yet, and waits for all of it.

        A parameter that no worker's loss depends on has no gradient afterwards, as in one process: an optimiser leaves it alone, weight decay and all.
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
        """Scales all gradients down to this norm, if theirs is above it."""
        wide = max((each.dtype for each in self._gradients), key=lambda kind: kind.itemsize)
        wide = torch.promote_types(wide, torch.float32)
        norms = [torch.linalg.vector_norm(each, dtype=wide) for each in self._gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in self._gradients:
            each.mul_(factor)

    def _cut(
        self, buffer: Tensor, indices: Sequence[int], cap_mb: float | None
    ) -> list[_Bucket]:
        """Full buckets, and one with the rest of the buffer, which may have no gradients."""
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
        """A gradient is there."""
        first = at not in self._touched
        self._touched.add(at)
        if self._begin is None:
            return
        if self._bucket_of[at] < len(self._waits):
            raise HeteroError(
                "a gradient changed after its sum over the workers had begun: the loss goes backward more than once; ask for HeteroOptions(bucket_cap_mb=None)"
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
