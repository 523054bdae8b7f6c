"""Products of layers of bitsandbytes with frozen, quantised weights.

Their own kernels take no packed tensors, and are wrong in double precision. Where programs are
recorded and where they are tested, such a layer computes what it is by definition: the product with
its weight in full, which is made from the packed numbers in each step, and again in the backward
pass, once for all trials. Trials that train alone keep the layers' own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from thrifty.pack._quantized import QuantizedLayer, layer_of, quantized_layers
from thrifty.pack.fused._fusable import UnfusableError, register_rule
from thrifty.pack.fused._packed import Group, Packed


FUNCTIONS = frozenset({
    "bitsandbytes::dequantize_4bit",
    "bitsandbytes::dequantize_blockwise",
})  # fmt: skip
"""Operators whose results follow from their arguments alone."""


def product(x: Any, bias: Any, layer: QuantizedLayer) -> Any:
    """Compute ``x @ weight.T + bias``.

    Args:
        x: Input, ``[..., in]``.
        bias: A bias that is not trained, ``[out]``, or None.
        layer: The layer.
    """
    if has_torch_function((x,)):
        return handle_torch_function(product, (x,), x, bias, layer)
    return _Product.apply(x, bias, layer)  # type: ignore[no-untyped-call]


@register_rule(product)
def _packed_product(group: Group, x: Packed, bias: Any, layer: QuantizedLayer) -> Packed:
    """Multiply the rows of all trials at once."""
    return group.pack(product(x.value, bias, layer), x.axis)


class _Product(torch.autograd.Function):
    """The product with a weight in full, which is not kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLayer
    ) -> torch.Tensor:
        """Multiply."""
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.weight(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the input."""
        gradient = gradients[0].to(ctx.dtype)
        return torch.matmul(gradient, ctx.layer.weight(ctx.dtype)), None, None


def _forward(module: Any, x: Any) -> Any:
    """Compute a quantised layer as a product; see ``Linear4bit.forward`` of bitsandbytes."""
    layer = layer_of(module)
    if layer is None or type(module._parameters["weight"]) is Packed:
        raise UnfusableError("its quantised layers are not held once for all trials")
    if not layer.is_product:
        raise UnfusableError("layers in 8 bits round what goes in by the whole batch")
    given = x.dtype
    if given != torch.float64 and getattr(module, "compute_dtype", None) is not None:
        x = x.to(module.compute_dtype)
    bias = module.bias
    apart = bias is not None and (type(bias) is Packed or bias.requires_grad)
    out = product(x, None if apart else bias, layer)
    return (out + bias if apart else out).to(given)


@cache
def _with_product(kind: Any) -> Any:
    """Return a class of layers that differs from another one in how it computes."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": _forward})


def compute_products(model: torch.nn.Module) -> None:
    """Let the quantised layers of a model compute products with their weights in full."""
    for layer in quantized_layers(model).values():
        kind: Any = type(layer.module)
        # a forward of the user's own may compute anything
        is_known = kind.forward.__module__.startswith("bitsandbytes.")
        if is_known and "forward" not in vars(layer.module):
            layer.module.__class__ = _with_product(kind)


@contextmanager
def computing_products(model: torch.nn.Module) -> Iterator[None]:
    """Let the quantised layers of a model do so within the context."""
    before = {layer.module: type(layer.module) for layer in quantized_layers(model).values()}
    compute_products(model)
    try:
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind
