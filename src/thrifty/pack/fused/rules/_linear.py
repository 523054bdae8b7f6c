"""Rule for linear layers: one batched matrix product for all trials.

Where all trials see the same large batch, it is one dense product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import register_rule


CACHE_BYTES = 2**23
"""Size up to which an input that all trials share is read again for each of them."""


@register_rule(F.linear)
def linear(group: Group, input: Any, weight: Any, bias: Any = None) -> Packed:
    """Compute ``x @ weight.T + bias`` for each trial."""
    if type(weight) is not Packed:
        weight = group.pack(group.first(weight))
    w = group.first(weight)
    b = None if bias is None else group.first(bias)
    if type(input) is not Packed:
        rows = input.reshape(-1, input.shape[-1])
        shape = input.shape[:-1]
    else:
        x = group.first(input)
        rows = x.reshape(group.size, -1, x.shape[-1])
        shape = x.shape[1:-1]
    out = _Linear.apply(rows, w, b)
    if out.dim() != len(shape) + 2:
        out = out.reshape(group.size, *shape, w.shape[1])
    # otherwise avoid a reshape: writing into a view costs a copy of its gradient
    return group.pack(out)


class _Linear(torch.autograd.Function):
    """A linear layer with its own gradient formula.

    Autograd's formula gives the weight's gradient transposed and copies it. This one does not.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the layer of all trials.

        Args:
            ctx: The autograd context.
            x: Input, ``[K, N, I]``, or ``[N, I]`` if all trials share it.
            w: Weights, ``[K, O, I]``.
            b: Biases, ``[K, O]``, or None.

        Returns:
            The output, ``[K, N, O]``.
        """
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None
        if _beyond_cache(x):
            return _read_once(x, w, b)
        shared = x if x.dim() == 3 else _for_all(x, w.shape[0])
        if b is None:
            return torch.bmm(shared, w.transpose(1, 2))
        return torch.baddbmm(b[:, None], shared, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, w and b, each in the layout of its tensor."""
        (grad,) = grads
        x, w = ctx.saved_tensors
        grad_x = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(grad, w)
            grad_x = grad_x if x.dim() == 3 else grad_x.sum(0)
        if _beyond_cache(x):
            grad_w = (grad.transpose(1, 2).reshape(-1, x.shape[0]) @ x).view(w.shape)
        else:
            shared = x if x.dim() == 3 else _for_all(x, w.shape[0])
            grad_w = torch.bmm(grad.transpose(1, 2), shared)
        if ctx.has_bias:
            grad_b = grad.sum(1)
        return grad_x, grad_w, grad_b


def _beyond_cache(x: torch.Tensor) -> bool:
    """Return whether ``x`` is shared by all trials and too large for the cache.

    Such an input comes from memory each time that it is read.
    """
    return x.dim() == 2 and x.numel() * x.element_size() > CACHE_BYTES


def _read_once(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Multiply an input that all trials share by the weights of all in one dense product."""
    size, width, _ = w.shape
    flat = w.reshape(size * width, -1)
    out = F.linear(x, flat, None if b is None else b.reshape(-1))
    return out.view(-1, size, width).transpose(0, 1).contiguous()


def _for_all(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unsqueeze(0) if size == 1 else x.expand(size, *x.shape)
