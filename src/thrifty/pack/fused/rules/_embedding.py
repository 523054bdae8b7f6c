"""Embeddings: one gather for all trials; gradients are summed in one pass over K x vocabulary rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thrifty.pack.fused._packed import Group, Packed
from thrifty.pack.fused._registry import UnfusableError, register_rule


@register_rule(F.embedding)
def embedding(
    group: Group,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Packed:
    """Rows of each trial's table, at its own indices or at shared ones."""
    if max_norm is not None:
        raise UnfusableError("nn.Embedding(max_norm=...) changes its weights as it reads them")
    if scale_grad_by_freq or sparse:
        option = "sparse" if sparse else "scale_grad_by_freq"
        raise UnfusableError(f"nn.Embedding({option}=True) has no batched rule")
    if type(weight) is not Packed:
        out = F.embedding(input.value, weight, padding_idx)
        return group.pack(out, input.axis)
    indices = group.first(input) if type(input) is Packed else input.unsqueeze(0)
    table = group.first(weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[1]
    return group.pack(_Embedding.apply(table, indices, padding_idx))


@register_rule(F.embedding_bag)
def embedding_bag(group: Group, *args: Any, **kwargs: Any) -> Packed:
    """Refused."""
    raise UnfusableError("nn.EmbeddingBag has no batched rule")


class _Embedding(torch.autograd.Function):
    """Reads the tables where they lie (views of the flat state), while ``F.embedding`` would have them copied."""

    @staticmethod
    def forward(
        ctx: Any, tables: torch.Tensor, indices: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        """``tables``: [K, V, D]; ``indices``: [K, ...], or [1, ...] for all; returns [K, ..., D]."""
        size, num, width = tables.shape
        if tables.stride()[1:] != (width, 1):
            tables = tables.contiguous()
        ctx.save_for_backward(indices)
        ctx.sizes, ctx.padding = tables.shape, padding
        # everything from the first number of a row on: rows overlap, and one can begin anywhere
        jump = tables.stride(0)
        last = (size - 1) * jump + (num - 1) * width
        rows = tables.as_strided((last + 1, width), (1, 1))
        begin = torch.add(_starts(indices, size, jump), indices, alpha=width)
        return rows.index_select(0, begin.reshape(-1)).view(*begin.shape, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the tables."""
        (indices,) = ctx.saved_tensors
        size, num, _ = ctx.sizes
        rows = _starts(indices, size, num) + indices
        if ctx.padding is not None:
            rows = torch.where(indices == ctx.padding, -1, rows)
        grad = torch.ops.aten.embedding_dense_backward(grads[0], rows, size * num, -1, False)
        return grad.view(ctx.sizes), None, None


def _starts(indices: torch.Tensor, size: int, jump: int) -> torch.Tensor:
    """``k * jump``, lined up with ``[K, ...]``."""
    starts = torch.arange(size, device=indices.device) * jump
    return starts.view(-1, *[1] * (indices.dim() - 1))
