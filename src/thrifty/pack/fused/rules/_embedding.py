"""Rules for embeddings: one gather for all trials.

Gradients are summed in one pass over K x vocabulary rows.
"""

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
    """Gather rows of each trial's table, at its own indices or at shared ones."""
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
    """Refuse ``nn.EmbeddingBag``."""
    raise UnfusableError("nn.EmbeddingBag has no batched rule")


class _Embedding(torch.autograd.Function):
    """An embedding that reads the tables in place, as views of the flat state.

    ``F.embedding`` would copy them first.
    """

    @staticmethod
    def forward(
        ctx: Any, tables: torch.Tensor, indices: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        """Gather the rows of all trials.

        Args:
            ctx: The autograd context.
            tables: The tables, ``[K, V, D]``.
            indices: Indices, ``[K, ...]``, or ``[1, ...]`` if all trials share them.
            padding: Index whose row gets no gradient; None for none.

        Returns:
            The rows, ``[K, ..., D]``.
        """
        size, num, width = tables.shape
        if tables.stride()[1:] != (width, 1):
            tables = tables.contiguous()
        ctx.save_for_backward(indices)
        ctx.sizes, ctx.padding = tables.shape, padding
        # one overlapping row per element of the memory, so that a row can begin at any element
        jump = tables.stride(0)
        last = (size - 1) * jump + (num - 1) * width
        rows = tables.as_strided((last + 1, width), (1, 1))
        begin = torch.add(_starts(indices, size, jump), indices, alpha=width)
        return rows.index_select(0, begin.reshape(-1)).view(*begin.shape, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the tables."""
        (indices,) = ctx.saved_tensors
        size, num, _ = ctx.sizes
        rows = _starts(indices, size, num) + indices
        if ctx.padding is not None:
            rows = torch.where(indices == ctx.padding, -1, rows)
        grad = torch.ops.aten.embedding_dense_backward(grads[0], rows, size * num, -1, False)
        return grad.view(ctx.sizes), None, None


def _starts(indices: torch.Tensor, size: int, jump: int) -> torch.Tensor:
    """Return ``k * jump`` for each trial ``k``, shaped to broadcast against ``[K, ...]``."""
    starts = torch.arange(size, device=indices.device) * jump
    return starts.view(-1, *[1] * (indices.dim() - 1))
