"""Batch normalisation over the whole global batch, for shares of any size and on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from thrifty.core import HeteroError


Sum = Callable[[Tensor], None]
"""Replaces a tensor by its sum over all workers."""


class WholeBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` or ``3d`` with the statistics of the global batch.

    ``nn.SyncBatchNorm`` does the same on GPUs. This class also supports CPUs and workers that join
    and leave. Each mean is a sum over all workers divided by the total number of samples, so any
    split gives the statistics and the gradient of one process with the whole batch.

    Args:
        layer: The layer to replace. Parameters, buffers and options are taken over, so
            ``state_dict`` stays the same.
        shared: Sums over the workers, and records what was summed.
    """

    _shared: SharedSums

    def __init__(self, layer: _BatchNorm, shared: SharedSums) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({
            key: value for key, value in layer.__dict__.items() if key != "training"
        })
        self.training = layer.training
        self._of = type(layer)
        # Bypass nn.Module: this is neither a module nor a tensor, and no part of the layer's state.
        object.__setattr__(self, "_shared", shared)

    def _check_input_dim(self, input: Tensor) -> None:
        self._of._check_input_dim(self, input)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as ``nn.BatchNorm`` does."""
        self._check_input_dim(input)
        if not self.training or not self._shared.active:
            return super().forward(input)
        # As in torch, statistics of half-precision inputs are computed in single precision.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.new_full((1,), x.numel() // max(1, x.shape[1]))
        sums = self._shared.add(torch.cat([x.sum(dims), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        var = self._shared.add(centred.square().sum(dims)) / total
        self._shared.ran(self, sums.detach())
        self._track(mean.detach(), var.detach(), total)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def shadow(self, like: Tensor) -> None:
        """Take part in the others' forward pass without samples, tracking the same statistics."""
        sums = self._shared.add(torch.zeros_like(like))
        total = sums[-1]
        var = self._shared.add(torch.zeros_like(like[:-1])) / total
        self._track(sums[:-1] / total, var, total)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        if not self.track_running_stats:
            return
        rate = self.momentum or 0.0  # torch's default where nothing counts the batches
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                rate = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return  # a user has removed the statistics, and torch tracks none either
        kind = self.running_mean.dtype
        self.running_mean.lerp_(mean.to(kind), rate)
        self.running_var.lerp_((var * total / (total - 1).clamp(min=1)).to(kind), rate)


class SharedSums:
    """Sums over all workers in the forward and the backward pass.

    A worker without samples in a step sends zeros instead (``shadow``), in the order of its last
    pass with samples.
    """

    def __init__(self, sum_: Sum | None) -> None:
        self._sum = sum_
        self._together = False
        self._forward: list[tuple[WholeBatchNorm, Tensor]] = []
        self._backward: list[Tensor] = []
        self.active = False

    @contextmanager
    def step(self, *, together: bool) -> Iterator[None]:
        """Run a forward and a backward pass with samples.

        Args:
            together: Whether to sum with the other workers; a rehearsal sums nothing.
        """
        self._forward, self._backward = [], []
        self._together, self.active = together, True
        try:
            yield
        finally:
            self.active = False

    def shadow(self) -> None:
        """Take part in a forward and a backward pass without samples."""
        self._together = True
        for layer, like in list(self._forward):
            layer.shadow(like)
        for like in list(self._backward):
            self.forward_sum(torch.zeros_like(like))

    def add(self, value: Tensor) -> Tensor:
        """Return the sum over all workers. Its gradient is the sum of their gradients."""
        return _Added.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def ran(self, layer: WholeBatchNorm, like: Tensor) -> None:
        """Record that a layer ran in this pass."""
        self._forward.append((layer, like))

    def forward_sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over all workers now."""
        out = value.detach().clone().contiguous()
        if self._together and self._sum is not None:
            self._sum(out)
        return out

    def backward_sum(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over all workers now, and record it."""
        out = self.forward_sum(gradient)
        self._backward.append(out)
        return out


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shared: SharedSums) -> Tensor:
        ctx.shared = shared
        return shared.forward_sum(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.backward_sum(grad), None


def whole_batch_norm(model: nn.Module, shared: SharedSums) -> int:
    """Replace a model's batch normalisation layers in place, and return how many there are.

    Raises:
        HeteroError: The model itself is such a layer, which cannot be replaced in place.
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, WholeBatchNorm):
        raise HeteroError(
            "a model that is nothing but batch normalisation cannot be changed in place: put it "
            "into an nn.Sequential, or ask for batch_norm='local'"
        )
    made: dict[nn.Module, WholeBatchNorm] = {}  # a layer may be used in several places
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, _BatchNorm) and not isinstance(child, WholeBatchNorm):
                if child not in made:
                    made[child] = WholeBatchNorm(child, shared)
                setattr(module, name, made[child])
    return len(made)
