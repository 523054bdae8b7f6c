"""What the tape knows of ATen functions: which can write into a given buffer, which only look at memory differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


aten: Any = torch.ops.aten


def _clone(x: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """The layout was settled when the buffer was made."""
    return out.copy_(x)


OUT_VARIANTS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    # torch's own functions are called at half the cost of their ATen overloads
    aten.abs.default: (torch.abs, ("out",)),
    aten.add.Tensor: (torch.add, ("out",)),
    aten.addcdiv.default: (torch.addcdiv, ("out",)),
    aten.addcmul.default: (torch.addcmul, ("out",)),
    aten.addmm.default: (torch.addmm, ("out",)),
    aten.amax.default: (torch.amax, ("out",)),
    aten.baddbmm.default: (torch.baddbmm, ("out",)),
    aten.bmm.default: (torch.bmm, ("out",)),
    aten.cat.default: (torch.cat, ("out",)),
    aten.clamp.default: (torch.clamp, ("out",)),
    aten.clamp_min.default: (torch.clamp_min, ("out",)),
    aten.cos.default: (torch.cos, ("out",)),
    aten.div.Tensor: (torch.div, ("out",)),
    aten.exp.default: (torch.exp, ("out",)),
    aten.gather.default: (torch.gather, ("out",)),
    aten.ge.Scalar: (torch.ge, ("out",)),
    aten.gt.Scalar: (torch.gt, ("out",)),
    aten.index_select.default: (torch.index_select, ("out",)),
    aten.le.Scalar: (torch.le, ("out",)),
    aten.log.default: (torch.log, ("out",)),
    aten.lt.Scalar: (torch.lt, ("out",)),
    aten.mean.dim: (torch.mean, ("out",)),
    aten.mm.default: (torch.mm, ("out",)),
    aten.mul.Tensor: (torch.mul, ("out",)),
    aten.neg.default: (torch.neg, ("out",)),
    aten.pow.Tensor_Scalar: (torch.pow, ("out",)),
    aten.reciprocal.default: (torch.reciprocal, ("out",)),
    aten.relu.default: (lambda x, out: torch.clamp_min(x, 0, out=out), ("out",)),
    aten.rsqrt.default: (torch.rsqrt, ("out",)),
    aten.sigmoid.default: (torch.sigmoid, ("out",)),
    aten.sin.default: (torch.sin, ("out",)),
    aten.sqrt.default: (torch.sqrt, ("out",)),
    aten.sub.Tensor: (torch.sub, ("out",)),
    aten.sum.dim_IntList: (torch.sum, ("out",)),
    aten.tanh.default: (torch.tanh, ("out",)),
    # these have no function in torch that takes ``out``
    aten._log_softmax.default: (aten._log_softmax.out, ("out",)),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, ("out",)),
    aten._softmax.default: (aten._softmax.out, ("out",)),
    aten._softmax_backward_data.default: (
        aten._softmax_backward_data.out,
        ("grad_input",),
    ),
    aten.clone.default: (_clone, ("out",)),
    aten.elu.default: (aten.elu.out, ("out",)),
    aten.gelu.default: (aten.gelu.out, ("out",)),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, ("grad_input",)),
    aten.leaky_relu.default: (aten.leaky_relu.out, ("out",)),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, ("grad_input",)),
    aten.mse_loss.default: (aten.mse_loss.out, ("out",)),
    aten.mse_loss_backward.default: (aten.mse_loss_backward.grad_input, ("grad_input",)),
    aten.nll_loss_backward.default: (aten.nll_loss_backward.grad_input, ("grad_input",)),
    aten.nll_loss_forward.default: (
        aten.nll_loss_forward.output,
        ("output", "total_weight"),
    ),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, ("grad_input",)),
    aten.silu.default: (aten.silu.out, ("out",)),
    aten.silu_backward.default: (aten.silu_backward.grad_input, ("grad_input",)),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, ("grad_input",)),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, ("grad_input",)),
    aten.where.self: (torch.where, ("out",)),
}
"""Function -> the variant that writes into buffers, and the names it takes them by."""

IN_PLACE_SAFE = frozenset({
    aten.abs.default, aten.add.Tensor, aten.clamp.default, aten.clamp_min.default, aten.cos.default,
    aten.div.Tensor, aten.exp.default, aten.gelu.default, aten.gelu_backward.default, aten.log.default,
    aten.mul.Tensor, aten.neg.default, aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.relu.default,
    aten.rsqrt.default, aten.sigmoid.default, aten.sigmoid_backward.default, aten.silu.default,
    aten.silu_backward.default, aten.sin.default, aten.sqrt.default, aten.sub.Tensor, aten.tanh.default,
    aten.tanh_backward.default, aten.threshold_backward.default, aten.leaky_relu.default,
    aten.leaky_relu_backward.default, aten.elu.default,
})  # fmt: skip
"""Functions of elements: they may write over an argument of the same shape."""

VIEWS = frozenset({
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
})
"""Functions that return memory of their argument, though their schema does not say so."""

CREATIONS = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.full.default,
    aten.full_like.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.ones.default, aten.ones_like.default, aten.scalar_tensor.default, aten.zeros.default,
    aten.zeros_like.default, aten.linspace.default,
})  # fmt: skip
"""Functions whose result depends on shapes alone."""
