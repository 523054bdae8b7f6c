"""Facts about ATen functions for the tape: which can write into a given buffer, which are views."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


aten: Any = torch.ops.aten


def _relu(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(x, 0, out=out)


def _clone(x: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """Copy ``x`` into the buffer, whose layout and dtype were chosen when it was made."""
    return out.copy_(x)


NARROW, MANY = 32, 64
"""Bounds for many short rows: at most ``NARROW`` long, at least ``MANY`` of them.

torch computes softmax row by row, so it cannot vectorise such input.
"""


def _log_softmax(x: torch.Tensor, dim: int, *half: Any, out: torch.Tensor) -> None:
    """Compute ``aten::_log_softmax`` bit for bit, taking many short rows side by side."""
    if _is_narrow(x, dim):
        out.copy_(aten._log_softmax(x.t().contiguous(), 0, *half).t())
    else:
        aten._log_softmax.out(x, dim, *half, out=out)


def _is_narrow(x: torch.Tensor, dim: int) -> bool:
    return (
        not x.is_cuda and x.dim() == 2 and dim == 1 and len(x) >= MANY and x.shape[1] <= NARROW
    )


_QUICK: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    aten._log_softmax.default: (_log_softmax, ("out",)),
    aten.abs.default: (torch.abs, ("out",)),
    aten.add.Tensor: (torch.add, ("out",)),
    aten.addcmul.default: (torch.addcmul, ("out",)),
    aten.addmm.default: (torch.addmm, ("out",)),
    aten.baddbmm.default: (torch.baddbmm, ("out",)),
    aten.bmm.default: (torch.bmm, ("out",)),
    aten.cat.default: (torch.cat, ("out",)),
    aten.clamp_min.default: (torch.clamp_min, ("out",)),
    aten.clone.default: (_clone, ("out",)),
    aten.div.Tensor: (torch.div, ("out",)),
    aten.exp.default: (torch.exp, ("out",)),
    aten.gather.default: (torch.gather, ("out",)),
    aten.index_select.default: (torch.index_select, ("out",)),
    aten.mean.dim: (torch.mean, ("out",)),
    aten.mm.default: (torch.mm, ("out",)),
    aten.mul.Tensor: (torch.mul, ("out",)),
    aten.neg.default: (torch.neg, ("out",)),
    aten.pow.Tensor_Scalar: (torch.pow, ("out",)),
    aten.relu.default: (_relu, ("out",)),
    aten.rsqrt.default: (torch.rsqrt, ("out",)),
    aten.sigmoid.default: (torch.sigmoid, ("out",)),
    aten.sqrt.default: (torch.sqrt, ("out",)),
    aten.sub.Tensor: (torch.sub, ("out",)),
    aten.sum.dim_IntList: (torch.sum, ("out",)),
    aten.tanh.default: (torch.tanh, ("out",)),
    aten._to_copy.default: (_clone, ("out",)),
}
"""Faster functions to call instead of ATen overloads, with the names of their buffers.

Calling torch's own functions costs half as much as calling their ATen overloads. Some functions are
better computed in another way.
"""

OutVariant = tuple[Callable[..., Any], tuple[str, ...]]


@cache
def out_variant(function: Any, device_type: str) -> OutVariant | None:
    """Return the variant of a function that writes into buffers, and the names of these arguments.

    The result is None if no variant has its own kernel, since generated variants only copy.
    """
    if function in _QUICK:
        return _QUICK[function]
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    key = "CUDA" if device_type == "cuda" else "CPU"
    for name in function._overloadpacket.overloads():
        other = getattr(function._overloadpacket, name)
        inputs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = tuple(a.name for a in other._schema.arguments if a.is_out)
        if inputs == wanted and len(outs) == len(function._schema.returns):
            # variants without a native kernel are generated: they call the function and copy
            native = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), key)
            return (other, outs) if native else None
    return None


IN_PLACE_SAFE = frozenset({
    aten.abs.default, aten.add.Tensor, aten.clamp.default, aten.clamp_min.default, aten.cos.default,
    aten.div.Tensor, aten.exp.default, aten.gelu.default, aten.gelu_backward.default,
    aten.log.default, aten.mul.Tensor, aten.neg.default, aten.pow.Tensor_Scalar,
    aten.reciprocal.default, aten.relu.default, aten.rsqrt.default, aten.sigmoid.default,
    aten.sigmoid_backward.default, aten.silu.default, aten.silu_backward.default, aten.sin.default,
    aten.sqrt.default, aten.sub.Tensor, aten.tanh.default, aten.tanh_backward.default,
    aten.threshold_backward.default, aten.leaky_relu.default, aten.leaky_relu_backward.default,
    aten.elu.default,
})  # fmt: skip
"""Element-wise functions, which may overwrite an argument of the same shape."""

VIEWS = frozenset({
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
})
"""Functions whose result shares memory with their argument although their schema is silent."""

CREATIONS = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default,
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.new_ones.default,
    aten.new_zeros.default, aten.ones.default, aten.ones_like.default, aten.scalar_tensor.default,
    aten.zeros.default, aten.zeros_like.default, aten.linspace.default,
})  # fmt: skip
"""Functions whose result depends only on shapes and plain arguments."""
