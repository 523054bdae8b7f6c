"""Gradients side by side in one buffer, with what workers tell each other at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from thrifty.core import HeteroError


class FlatGradients:
    """One buffer for each type of gradient; ``grad`` of every parameter is a view of it, so nothing is copied.

    Beside the gradients of each buffer the first one ends with ``num_control`` numbers: all that the workers tell each other at a step goes with the gradients.

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
        # Times and counts need the precision of float32 at least.
        wide = next((key for key in groups if key[0].itemsize >= 4), None)
        for key, members in groups.items():
            size = sum(member.numel() for member in members)
            more = num_control if key == wide else 0
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
                self.control = buffer[size:]
        if wide is None:
            self.control = torch.zeros(num_control, device=device)
            self._buffers.append(self.control)

    @property
    def num_bytes(self) -> int:
        """Of all buffers: what one sum takes in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def zero(self) -> None:
        """Before a backward pass."""
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

    def reduce(self, sum_: Callable[[Tensor], None]) -> None:
        """Sums every buffer over the workers."""
        for buffer in self._buffers:
            sum_(buffer)

    def clip(self, max_norm: float) -> None:
        """Scales all gradients down to this norm, if theirs is above it."""
        norms = [torch.linalg.vector_norm(each).float() for each in self._gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in self._gradients:
            each.mul_(factor)
