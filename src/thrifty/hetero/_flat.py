"""Gradients side by side in one buffer, with what workers tell each other at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from thrifty.core import HeteroError


class FlatGradients:
    """One buffer for each type of gradient; ``grad`` of every parameter is a view of it, so nothing is copied.

    One of the buffers ends with ``num_control`` numbers, and one for each parameter, whether it had a gradient: all that the workers tell each other at a step goes with the gradients.

    Args:
        parameters: that need a gradient.
        num_control: numbers told.

    Raises:
        HeteroError: there is nothing to train.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, num_control: int) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        if not groups:
            raise HeteroError("no parameter of the model needs a gradient")
        device = next(iter(groups))[1]
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._buffers: list[Tensor] = []
        self._gradients: list[Tensor] = []
        told = num_control + sum(len(members) for members in groups.values())
        # Times and counts need the precision of float32 at least.
        wide = next((key for key in groups if key[0].itemsize >= 4), None)
        for key, members in groups.items():
            size = sum(member.numel() for member in members)
            more = told if key == wide else 0
            buffer = torch.zeros(size + more, dtype=key[0], device=key[1])
            self._buffers.append(buffer)
            self._gradients.append(buffer[:size])
            begin = 0
            for member in members:
                self._views.append((
                    member,
                    buffer[begin : begin + member.numel()].view_as(member),
                ))
                begin += member.numel()
            if more:
                tail = buffer[size:]
        if wide is None:
            tail = torch.zeros(told, device=device)
            self._buffers.append(tail)
        self.control, self._used = tail[:num_control], tail[num_control:]
        self._touched: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._touch, at))
            for at, (parameter, _) in enumerate(self._views)
        ]

    @property
    def num_bytes(self) -> int:
        """Of all buffers: what one sum takes in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def close(self) -> None:
        """Another buffer takes its place."""
        for hook in self._hooks:
            hook.remove()

    def zero(self) -> None:
        """Before a backward pass."""
        self._touched.clear()
        for buffer in self._buffers:
            buffer.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def collect(self) -> None:
        """After a backward pass: takes in gradients that landed elsewhere."""
        for parameter, view in self._views:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise HeteroError(
                    "sparse gradients cannot be summed side by side with others; use sparse=False"
                )
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view
        for at in self._touched:
            self._used[at] = 1.0

    def reduce(self, sum_: Callable[[Tensor], None]) -> None:
        """Sums every buffer over the workers.

        A parameter that no worker's loss depends on has no gradient afterwards, as in one process: an optimiser leaves it alone, weight decay and all.
        """
        for buffer in self._buffers:
            sum_(buffer)
        for (parameter, _), used in zip(self._views, self._used.tolist(), strict=True):
            if not used:
                parameter.grad = None

    def clip(self, max_norm: float) -> None:
        """Scales all gradients down to this norm, if theirs is above it."""
        wide = max((each.dtype for each in self._gradients), key=lambda kind: kind.itemsize)
        wide = torch.promote_types(wide, torch.float32)
        norms = [torch.linalg.vector_norm(each, dtype=wide) for each in self._gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in self._gradients:
            each.mul_(factor)

    def _touch(self, at: int, _: nn.Parameter) -> None:
        self._touched.add(at)
